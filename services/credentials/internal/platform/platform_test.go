package platform

import (
	"bytes"
	"context"
	"encoding/base64"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/services/credentials/internal/platform/platformtest"
)

func keyPath(t *testing.T) string { return filepath.Join(t.TempDir(), "keys", "k.json") }

// places are the kinds of platform key that need no cloud client; package
// cloudkms tests the others.
var places = map[string]func(*testing.T) string{
	"file": func(*testing.T) string { return "" },
	"fake of Vault": func(t *testing.T) string {
		platformtest.Vault(t)
		return "hashivault://berth"
	},
}

func TestARecordKeyComesBackAndEachIsItsOwn(t *testing.T) {
	for name, place := range places {
		t.Run(name, func(t *testing.T) {
			ref, path := place(t), keyPath(t)
			platformtest.Records(t, RecordKeyBytes, func() (platformtest.Key, error) {
				k, err := Open(t.Context(), ref, path)
				if err != nil {
					return platformtest.Key{}, err
				}
				return platformtest.Key{Wrapped: k.Wrapped, Close: k.Close, Unwrap: func(ctx context.Context, wrapped []byte) ([]byte, error) {
					return k.Unwrap(ctx, k.By(), wrapped)
				}}, nil
			})
		})
	}
}

// TestProgramWithoutCloudClientsNamesTheBuildThatHasThem opens cloud keys in
// this program, which does not import package cloudkms.
func TestProgramWithoutCloudClientsNamesTheBuildThatHasThem(t *testing.T) {
	for ref, scheme := range map[string]string{
		"awskms://alias/b?region=eu-central-1":                    "awskms",
		"gcpkms://projects/p/locations/l/keyRings/r/cryptoKeys/k": "gcpkms",
		"azurekeyvault://v.vault.azure.net/keys/k":                "azurekeyvault",
	} {
		_, err := Open(t.Context(), ref, keyPath(t))
		want := "this program was built without " + scheme + "://; build it with make build CLOUD=1"
		if !errs.Is(err, errkind.Invalid) || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: got %v, want %s", ref, err, want)
		}
	}
}

func TestAServiceMakesNoKeyFile(t *testing.T) {
	platformtest.Vault(t)
	path := keyPath(t)
	if _, err := Open(t.Context(), "hashivault://berth", path); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Error("a key file was made", err)
	}
}

// Whatever a service answers is no data loss, takes no longer than the bound
// and leaves one short line.
func TestAServiceThatIsAwayOrOddIsUnavailable(t *testing.T) {
	hang := make(chan struct{})
	t.Cleanup(func() { close(hang) })
	for name, do := range map[string]func(http.ResponseWriter, *http.Request){
		"never answers": func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-hang:
			case <-r.Context().Done():
			}
		},
		"is down":              platformtest.Answer(http.StatusServiceUnavailable, `{"errors":["Vault is sealed"]}`),
		"refuses":              platformtest.Answer(http.StatusForbidden, `{"errors":["permission denied"]}`),
		"says nothing":         platformtest.Answer(http.StatusNoContent, ""),
		"answers without data": platformtest.Answer(http.StatusOK, `{}`),
		"answers other types":  platformtest.Answer(http.StatusOK, `{"data":{"plaintext":7,"ciphertext":true}}`),
		"answers no base64":    platformtest.Answer(http.StatusOK, `{"data":{"plaintext":"%%%","ciphertext":""}}`),
		"answers a short key":  platformtest.Answer(http.StatusOK, `{"data":{"plaintext":"`+base64.StdEncoding.EncodeToString([]byte("short"))+`","ciphertext":"x"}}`),
		"answers a page":       platformtest.Answer(http.StatusBadGateway, strings.Repeat("<p>no\n\n", 10000)),
		"answers too much":     platformtest.Answer(http.StatusOK, `{"data":{"plaintext":"","ciphertext":"`+strings.Repeat("x", 1<<20)+`"}}`),
	} {
		t.Run(name, func(t *testing.T) {
			f := platformtest.Vault(t)
			k, err := Open(t.Context(), "hashivault://berth", keyPath(t))
			if err != nil {
				t.Fatal(err)
			}
			_, wrapped, err := k.Wrapped(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			k.wait = 200 * time.Millisecond
			f.Fail(do)
			_, _, err1 := k.Wrapped(t.Context())
			_, err2 := k.Unwrap(t.Context(), ByService, wrapped)
			for _, err := range []error{err1, err2} {
				if !errs.Is(err, errkind.Unavailable) || strings.Contains(err.Error(), "\n") || len(err.Error()) > 500 {
					t.Errorf("%v", err)
				}
			}
			f.Fail(nil)
			k.wait = callWait
			if _, err := k.Unwrap(t.Context(), ByService, wrapped); err != nil {
				t.Error("it did not come back:", err)
			}
		})
	}
}

func TestStartFindsAServiceThatMayOnlyEncrypt(t *testing.T) {
	f := platformtest.Vault(t)
	f.Fail(func(w http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.URL.Path, "/decrypt/") {
			platformtest.Answer(http.StatusForbidden, `{"errors":["permission denied"]}`)(w, r)
			return
		}
		platformtest.Answer(http.StatusOK, `{"data":{"ciphertext":"vault:v1:x"}}`)(w, r)
	})
	if _, err := Open(t.Context(), "hashivault://berth", keyPath(t)); !errs.Is(err, errkind.Unavailable) {
		t.Error(err)
	}
}

func TestWhatWrappedARecordMustBeThere(t *testing.T) {
	platformtest.Vault(t)
	path := keyPath(t)
	file, err := Open(t.Context(), "file", path)
	if err != nil {
		t.Fatal(err)
	}
	key, byFile, err := file.Wrapped(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	both, err := Open(t.Context(), "hashivault://berth", path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := both.Unwrap(t.Context(), ByFile, byFile); err != nil || !bytes.Equal(got, key) {
		t.Error("a record of before the service:", err)
	}
	_, byService, err := both.Wrapped(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	service, err := Open(t.Context(), "hashivault://berth", keyPath(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		key  *Key
		by   By
		raw  []byte
		want errkind.Kind
	}{
		"no file":           {service, ByFile, byFile, errkind.DataLoss},
		"no service":        {file, ByService, byService, errkind.Unavailable},
		"nobody":            {both, 'x', byFile, errkind.DataLoss},
		"too short":         {file, ByFile, byFile[:3], errkind.DataLoss},
		"another's version": {file, ByFile, append([]byte{9, 9, 9, 9}, byFile[4:]...), errkind.DataLoss},
	} {
		if _, err := tc.key.Unwrap(t.Context(), tc.by, tc.raw); !errs.Is(err, tc.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCheckRefusesKeysInConfigurationAndOpenWires(t *testing.T) {
	for _, ref := range []string{"", "file", "hashivault://berth", "hashivault://berth?engine=t2", "awskms:///arn:aws:kms:eu-central-1:111122223333:key/x?region=eu-central-1",
		"awskms://alias/b?endpoint=https://kms.example.com", "gcpkms://projects/p/locations/l/keyRings/r/cryptoKeys/k",
		"azurekeyvault://v.vault.azure.net/keys/k?algorithm=RSA-OAEP-256"} {
		if err := Check(ref); err != nil {
			t.Errorf("%s: %v", ref, err)
		}
	}
	secret := "smGbjm71Nxd1Ig5FS0wj9SlbzAIrnolCz9bQQ6uAhl4="
	for _, ref := range []string{"base64key://" + secret, "stringkey://" + secret, secret, "File", "awskms://", "hashivault:///", "https://vault.example.com",
		"hashivault://user:" + secret + "@berth", "awskms://alias/b?endpoint=http://kms.example.com", "gcpkms://\x7f"} {
		err := Check(ref)
		if !errs.Is(err, errkind.Invalid) {
			t.Errorf("%s: %v", ref, err)
		} else if strings.Contains(err.Error(), secret) {
			t.Errorf("the sentence repeats the secret: %v", err)
		}
		if _, err := Open(t.Context(), ref, keyPath(t)); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%s was opened: %v", ref, err)
		}
	}
}

func TestVaultInTheClearIsRefused(t *testing.T) {
	for _, address := range []string{"http://vault.example.com:8200", "http://10.0.0.1:8200", ""} {
		platformtest.Vault(t)
		t.Setenv("VAULT_SERVER_URL", address)
		if _, err := Open(t.Context(), "hashivault://berth", keyPath(t)); !errs.Is(err, errkind.Invalid) {
			t.Errorf("%q: %v", address, err)
		}
	}
}

func TestOpenEndsWithItsContext(t *testing.T) {
	platformtest.Vault(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(ctx, "hashivault://berth", keyPath(t)); err == nil {
		t.Error("it opened")
	}
}

func FuzzCheck(f *testing.F) {
	f.Add("hashivault://berth?engine=transit")
	f.Add("awskms://alias/b?endpoint=http://[::1]:80")
	f.Add("azurekeyvault://")
	f.Fuzz(func(t *testing.T, ref string) {
		if Check(ref) == nil && ref != "" && ref != "file" && !strings.Contains(ref, "://") {
			t.Errorf("%q passed", ref)
		}
	})
}

func BenchmarkWrapAndUnwrapByFile(b *testing.B) {
	k, err := Open(b.Context(), "", filepath.Join(b.TempDir(), "k.json"))
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, _, err := k.Wrapped(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
