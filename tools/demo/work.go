package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/berth-dev/berth/sdk"
)

const home = "/root"

// job sums a column per group with python3, then commits the result with git.
const job = `
import csv, collections
sums = collections.Counter(); rows = 0
with open("data.csv") as f:
    for row in csv.reader(f):
        sums[row[0]] += int(row[1]); rows += 1
with open("result.txt", "w") as f:
    for k in sorted(sums): f.write(f"{k} {sums[k]}\n")
print(rows, sum(sums.values()))
`

const commit = `set -e
git init -q . && git config user.email u@example.test && git config user.name u
git add result.txt && git commit -q -m "the result" && git rev-parse HEAD`

const csvRows = 600_000

// makeCSV writes at least 10 MB with known sums.
func makeCSV(seed int) (data []byte, sum int) {
	var b bytes.Buffer
	for i := range csvRows {
		v := (i*7919 + seed) % 100003
		fmt.Fprintf(&b, "group%02d,%d,row-%d\n", i%17, v, i)
		sum += v
	}
	return b.Bytes(), sum
}

func (d *demo) workBoth(ctx context.Context) error {
	return d.both(func(u *user) error {
		data, sum := makeCSV(len(u.marker) + int(u.name[0]))
		began := time.Now()
		if _, err := u.session.Files().Write(ctx, home+"/data.csv", bytes.NewReader(data), sdk.WriteOptions{}); err != nil {
			return fmt.Errorf("write data.csv: %w", err)
		}
		d.tookOf(u, fmt.Sprintf("write a CSV of %d MB", len(data)/1_000_000), time.Since(began))
		began = time.Now()
		out, err := output(ctx, u.session, "python3", "-c", job)
		if err != nil {
			return fmt.Errorf("python3: %w", err)
		}
		d.tookOf(u, "python3 over the CSV", time.Since(began))
		began = time.Now()
		head, err := output(ctx, u.session, "sh", "-c", commit)
		if err != nil {
			return fmt.Errorf("git: %w", err)
		}
		d.tookOf(u, "git init and commit", time.Since(began))
		d.execTimes(ctx, u)
		if u.hash, err = hashFiles(ctx, u.session); err != nil {
			return err
		}
		want := fmt.Sprintf("%d %d", csvRows, sum)
		d.check(u.name+"'s job is right", out == want && len(data) >= 10_000_000 && len(head) == 40,
			fmt.Sprintf("%d bytes in, rows and sum %q, commit %.10s", len(data), out, head))
		return nil
	})
}

// execTimes records the best of 20 execs of true, so that one number stands for a quiet machine.
func (d *demo) execTimes(ctx context.Context, u *user) {
	best := time.Duration(math.MaxInt64)
	for range 20 {
		began := time.Now()
		if u.session.Run(ctx, sdk.Command("true")) != nil {
			return
		}
		best = min(best, time.Since(began))
	}
	d.tookOf(u, "exec of true, best of 20", best)
}

func output(ctx context.Context, s *sdk.Session, args ...string) (string, error) {
	var out, errOut bytes.Buffer
	err := s.Run(ctx, sdk.Cmd{Args: args, Dir: home, Stdout: &out, Stderr: &errOut})
	if err != nil {
		return "", fmt.Errorf("%w: %.300s", err, errOut.String())
	}
	return strings.TrimSpace(out.String()), nil
}

// hashFiles hashes names and contents of all that is at home.
func hashFiles(ctx context.Context, s *sdk.Session) (string, error) {
	out, err := output(ctx, s, "sh", "-c", "find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum")
	if err != nil {
		return "", fmt.Errorf("hash the files: %w", err)
	}
	hash, _, _ := strings.Cut(out, " ")
	return hash, nil
}

// look searches everything that a sandbox can read for a word, which comes by
// standard input so that the search does not find itself.
const look = `
import os, sys, socket
words = [w for w in sys.stdin.read().split() if w]
hits = []
def seen(where, data):
    for w in words:
        if w.encode() in data: hits.append(where + " holds " + w)
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
    for f in ("cmdline", "environ", "cgroup", "mountinfo"):
        try: seen(f"/proc/{pid}/{f}", open(f"/proc/{pid}/{f}", "rb").read())
        except OSError: pass
for top in ("/root", "/home", "/tmp", "/run", "/etc", "/var", "/mnt", "/srv", "/opt", "/dev/shm"):
    for d, _, files in os.walk(top):
        for f in files:
            p = os.path.join(d, f)
            seen(p, p.encode())
            try:
                if os.path.isfile(p) and os.path.getsize(p) < 1 << 20: seen(p, open(p, "rb").read())
            except OSError: pass
seen("hostname", socket.gethostname().encode())
nets = os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else ["lo"]
print(len(hits), "hits", hits[:3], "interfaces", sorted(nets), "host", socket.gethostname())
`

// lookAtEachOther gives each user a secret file, a running process with a
// secret argument and environment, and has the other look for them.
func (d *demo) lookAtEachOther(ctx context.Context) error {
	secrets := []*sdk.Process{}
	for _, u := range d.users {
		p, err := u.session.Exec(ctx, sdk.Cmd{Args: []string{"sh", "-c", "echo $SECRET > /root/secret-$SECRET; sleep 300; :", u.marker},
			Env: map[string]string{"SECRET": u.marker}})
		if err != nil {
			return fmt.Errorf("start %s's secret process: %w", u.name, err)
		}
		secrets = append(secrets, p)
	}
	for i, u := range d.users {
		other := d.users[1-i]
		own, err := lookFor(ctx, u.session, u.marker)
		if err != nil {
			return err
		}
		theirs, err := lookFor(ctx, u.session, other.marker+" "+other.session.Key())
		if err != nil {
			return err
		}
		d.check(u.name+" sees own files and processes", !strings.HasPrefix(own, "0 hits"), own)
		d.check(u.name+" sees nothing of "+other.name, strings.HasPrefix(theirs, "0 hits") && strings.Contains(theirs, "interfaces ['lo']"), theirs)
	}
	for i, p := range secrets {
		if err := p.Signal("SIGKILL"); err != nil {
			return fmt.Errorf("end %s's secret process: %w", d.users[i].name, err)
		}
		_ = p.Wait() // ended by the signal: that is its error
	}
	return d.both(func(u *user) (err error) {
		u.hash, err = hashFiles(ctx, u.session)
		return err
	})
}

func lookFor(ctx context.Context, s *sdk.Session, words string) (string, error) {
	var out, errOut bytes.Buffer
	err := s.Run(ctx, sdk.Cmd{Args: []string{"python3", "-c", look}, Stdin: strings.NewReader(words), Stdout: &out, Stderr: &errOut})
	if err != nil {
		return "", fmt.Errorf("look around: %w: %.300s", err, errOut.String())
	}
	return strings.TrimSpace(out.String()), nil
}

func randomWord() string {
	var b [6]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
