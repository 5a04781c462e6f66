package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/testenv"
)

// takeAway makes the folder of a store read-only and empty, until back is called.
func takeAway(t *testing.T, store string) (back func()) {
	t.Helper()
	run(t, "mount", "-t", "tmpfs", "-o", "ro,size=4k", "tmpfs", store)
	back = sync.OnceFunc(func() {
		if err := syscall.Unmount(store, 0); err != nil {
			t.Errorf("give the store back: %v", err)
		}
	})
	t.Cleanup(back)
	return back
}

func stateNow(t *testing.T, c *sdk.Client) sdk.State {
	t.Helper()
	list, err := c.Status(t.Context(), sdk.UserSession{})
	if err != nil || len(list) != 1 {
		t.Fatalf("status: %v %v", list, err)
	}
	return list[0].State
}

// TestStoreUnreachableDelaysSleep: an idle session stays awake while its files cannot be saved, and
// says so; one that is closed all the same is told that its newest files are on one host only, and
// wakes with them while the close still tries. Once the store is back, it is saved and sleeps.
func TestStoreUnreachableDelaysSleep(t *testing.T) {
	store, url := fileStore(t)
	e := diskEnv(t, diskTerms{Store: url, Idle: 2 * time.Second})
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{})
	heard, user := listen(t, e.Operator(), s.Key()), listen(t, c, s.Key())
	back := takeAway(t, store)
	put(t, s, "/root/f", "newest")

	unsaved := hostEvent(t, heard.await(t, "unsaved", nil))
	sentence(t, "unsaved", unsaved.GetReason())
	user.await(t, "unsaved", nil)
	if _, err := s.Checkpoint(t.Context()); err == nil {
		t.Error("a checkpoint was acknowledged without a store")
	} else {
		t.Logf("the checkpoint says: %v", err)
	}
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if now := stateNow(t, c); now != sdk.Active && now != sdk.Sleeping {
			t.Fatalf("without a store the session is %s", now)
		}
	}
	epoch := s.Epoch()
	if again := open(t, c, sdk.OpenOptions{}); again.Epoch() != epoch || content(t, again, "/root/f") != "newest" {
		t.Errorf("without a store epoch %s became %s", epoch, again.Epoch())
	}

	closed := make(chan error, 1)
	go func() { closed <- s.Close(t.Context()) }()
	heard.await(t, "unsaved", func(ev sdk.Event) bool {
		reason := hostEvent(t, ev).GetReason()
		sentence(t, "unsaved at a close", reason)
		return strings.Contains(reason, "stopped")
	})
	if now := stateNow(t, c); now != sdk.Sleeping {
		t.Errorf("a sleep that is not saved is shown as %s", now)
	}
	s = open(t, e.Client("acme", "ann"), sdk.OpenOptions{})
	if s.Origin() != sdk.Resumed || s.Epoch() == epoch || content(t, s, "/root/f") != "newest" {
		t.Errorf("after the close: %s, epoch %s, the file says %q", s.Origin(), s.Epoch(), content(t, s, "/root/f"))
	}
	if err := <-closed; !errors.Is(err, sdk.ErrUnsaved) {
		t.Errorf("the close without a store ends with: %v", err)
	}

	heard = listen(t, e.Operator(), s.Key())
	back()
	heard.await(t, "asleep", nil)
	if now := show(t, e, s.Key()); now.Manifest == "" || len(objects(t, store, s.Key())) == 0 {
		t.Errorf("asleep without a manifest: %+v", now)
	}
	e.Down()
	e.LosePool()
	e.Up()
	if s := open(t, e.Client("acme", "ann"), sdk.OpenOptions{}); s.Origin() != sdk.Resumed || content(t, s, "/root/f") != "newest" {
		t.Errorf("from the store: %s, the file says %q", s.Origin(), content(t, s, "/root/f"))
	}
}

// TestStoreBackIsTold: a session that hears that its files are not saved hears also when they are again.
func TestStoreBackIsTold(t *testing.T) {
	store, url := fileStore(t)
	e := diskEnv(t, diskTerms{Store: url, Every: 5 * time.Second})
	c := e.Client("acme", "ann")
	s := open(t, c, sdk.OpenOptions{})
	heard := listen(t, c, s.Key())
	back := takeAway(t, store)
	put(t, s, "/root/f", "x")
	heard.await(t, "unsaved", nil)
	back()
	sentence(t, "saved", hostEvent(t, heard.await(t, "saved", nil)).GetReason())
	if now := show(t, e, s.Key()); now.State != string(sdk.Active) || now.Manifest == "" {
		t.Errorf("session show says %+v", now)
	}
}

// flip changes one byte in the middle of a file and returns how to change it back.
func flip(t *testing.T, path string) (back func()) {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func() {
		raw[len(raw)/2] ^= 0x40
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write()
	return write
}

// packs are the objects with file contents of a session, without the attribute files of the store.
func packs(t *testing.T, store, key string) (out []string) {
	t.Helper()
	for _, o := range objects(t, store, key) {
		if strings.Contains(o, "/packs/") && !strings.HasSuffix(o, ".attrs") {
			out = append(out, o)
		}
	}
	if len(out) == 0 {
		t.Fatal("the store has no packs")
	}
	return out
}

// TestFlippedChunkIsNeverHandedOut: a damaged object of a disk that is nowhere else fails the open by
// name, and no fresh disk is made; verify finds it; with the object whole again all is well.
func TestFlippedChunkIsNeverHandedOut(t *testing.T) {
	store, url := fileStore(t)
	e := diskEnv(t, diskTerms{Store: url})
	s := open(t, e.Client("acme", "ann"), sdk.OpenOptions{})
	key, want := s.Key(), tree(t, s)
	if err := s.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	verified(t, e, key)
	if err := e.Stop(); err != nil {
		t.Fatal(err)
	}
	e.LosePool()
	pack := packs(t, store, key)[0]
	heal := flip(t, pack)
	e.Up()
	c := e.Client("acme", "ann")
	name := filepath.Base(pack)
	for range 2 {
		_, err := c.Open(t.Context(), sdk.OpenOptions{Risk: sdk.OwnCode(), Wait: 10 * time.Second})
		if !errors.Is(err, sdk.OfKind(errkind.DataLoss)) {
			t.Fatalf("an open of a damaged disk ends with %v, want data loss", err)
		}
		now := show(t, e, key)
		if now.State != string(sdk.Failed) || !strings.Contains(now.Failure.Reason, name) {
			t.Errorf("session show says %+v, want a failure that names %s", now, name)
		}
	}
	out, err := e.CLI("disk", "verify", key)
	if status(err) != 1 || !strings.Contains(out+fmt.Sprint(err), name) {
		t.Errorf("verify of a damaged disk: %v\n%s", err, out)
	}
	heal()
	verified(t, e, key)
	if s = open(t, c, sdk.OpenOptions{}); s.Origin() != sdk.Resumed || sums(t, s) != want {
		t.Errorf("with the object whole again it is %s", s.Origin())
	}
}

// verified has the whole of what is stored of a session checked.
func verified(t *testing.T, e *testenv.Env, key string) {
	t.Helper()
	if out, err := e.CLI("disk", "verify", key); err != nil {
		t.Errorf("verify: %v\n%s", err, out)
	}
}

// status is the exit status of a program that failed.
func status(err error) int {
	var exit interface{ ExitCode() int }
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	return 0
}
