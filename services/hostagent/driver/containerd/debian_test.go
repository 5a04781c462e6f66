package containerd

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/berth-dev/berth/services/hostagent/driver"
	"github.com/berth-dev/berth/services/hostagent/internal/image"
)

// work is what a session does on a Debian image: a package is made and installed, with owners, a
// set-user-id file and a user of its own; python and git work. Each line ends in 'ok' or stops.
const work = `set -e
export HOME=/root DEBIAN_FRONTEND=noninteractive
id -u | grep -qx 0
mkdir -p /opt/p/DEBIAN /opt/p/usr/bin /opt/p/var/lib/thing
printf 'Package: thing\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n' > /opt/p/DEBIAN/control
printf '#!/bin/sh\nuseradd -r thing\nchown -R thing:thing /var/lib/thing\nchmod 4755 /usr/bin/thing\n' > /opt/p/DEBIAN/postinst
chmod 755 /opt/p/DEBIAN/postinst
printf '#!/bin/sh\necho thing\n' > /opt/p/usr/bin/thing
dpkg-deb -b /opt/p /opt/thing.deb >/dev/null
dpkg -i /opt/thing.deb >/dev/null
[ "$(stat -c %U /var/lib/thing)" = thing ]
[ "$(stat -c %a /usr/bin/thing)" = 4755 ]
thing >/dev/null
echo package ok
python3 -c 'import subprocess, threading, multiprocessing; print("python ok")'
git init -q /root/r && cd /root/r && echo x > f && git add f && git -c user.name=a -c user.email=a@example.org commit -qm x && echo git ok
setpriv --reuid 1000 --regid 1000 --clear-groups sh -c 'id -u; touch /tmp/mine' | grep -qx 1000
tar -C / -cf /tmp/etc.tar etc && tar -C /var -xf /tmp/etc.tar && echo tar ok
rm -rf /usr/share/doc && [ ! -e /usr/share/doc ] && mkdir /usr/share/doc && [ -z "$(ls /usr/share/doc)" ] && echo opaque ok
echo all ok
`

// again is what is left of it for the next sandbox on the same disk.
const again = `set -e
thing | grep -qx thing
[ "$(stat -c %U /var/lib/thing)" = thing ]
dpkg -s thing >/dev/null
[ -z "$(ls /usr/share/doc)" ]
[ ! -e /tmp/mine ]
cd /root/r && git status --porcelain | (! grep .)
echo all ok
`

func debianImage(t *testing.T, dir string) driver.Image {
	t.Helper()
	root := os.Getenv("BERTH_CACHE")
	if root == "" {
		cache, _ := os.UserCacheDir()
		root = filepath.Join(cache, "berth")
	}
	ref := filepath.Join(root, "images", "default")
	if _, err := os.Stat(ref); err != nil {
		t.Skipf("skipped: the default image is not built: %v", err)
	}
	s, err := image.Open(dir, func(_ context.Context, ref string) (v1.Image, error) {
		p, err := layout.FromPath(ref)
		if err != nil {
			return nil, err
		}
		index, err := p.ImageIndex()
		if err != nil {
			return nil, err
		}
		m, err := index.IndexManifest()
		if err != nil {
			return nil, err
		}
		return index.Image(m.Manifests[0].Digest)
	})
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	img, err := s.Ensure(context.Background(), ref)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("unpacked in %s", time.Since(began).Round(time.Millisecond))
	return img
}

func TestDebianWorksInEveryTierOnOneDisk(t *testing.T) {
	h := newHost(t)
	img := debianImage(t, filepath.Join(h.dir, "images"))
	if _, err := os.Stat(filepath.Join(img.Lower, "usr/bin/dpkg")); err != nil {
		t.Skip("skipped: the default image is no Debian")
	}
	d := openDriver(t, h)
	for i, tier := range h.cfg.Tiers {
		epoch := uint64(1)
		run := func(tier driver.Tier, script string) {
			spec := h.Spec(t, 10+i, epoch)
			epoch++
			spec.Tier, spec.Image, spec.Guest = tier, img, ""
			// It lives on until it is stopped: a pipe that nobody writes any more opens for nobody.
			spec.Init = []string{"/bin/sh", "-c", "exec 2>&1\n" + script + "\nexec sleep 300"}
			spec.Limits.PIDs, spec.Limits.MemoryBytes = 512, 1<<30 // xz takes much
			sb, err := d.Create(context.Background(), spec)
			if err != nil {
				t.Fatal(err)
			}
			out, err := os.Open(sb.Channel.Stdout)
			if err != nil {
				t.Fatal(err)
			}
			text := readUntil(out, "all ok\n")
			if !strings.HasSuffix(text, "all ok\n") {
				t.Errorf("%s: it says:\n%s", tier, text)
			}
			_ = out.Close()
			if err := d.Stop(context.Background(), sb.ID); err != nil {
				t.Fatal(err)
			}
		}
		run(tier, work)
		for _, other := range h.cfg.Tiers {
			run(other, again)
		}
	}
}

// readUntil reads until the end, the text, or too long.
func readUntil(r *os.File, end string) string {
	timer := time.AfterFunc(time.Minute, func() { _ = r.SetReadDeadline(time.Now()) })
	defer timer.Stop()
	var b strings.Builder
	buf := make([]byte, 4096)
	for !strings.HasSuffix(b.String(), end) {
		n, err := r.Read(buf)
		b.Write(buf[:n])
		if err != nil {
			break
		}
	}
	return b.String()
}
