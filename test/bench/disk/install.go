package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/sdk"
	"github.com/berth-dev/berth/test/bench/figures"
	"github.com/berth-dev/berth/tools/berth/upproc"
)

// config has two sizes of disks and no snapshots by themselves: only those that are measured.
const config = `host:
  capacity: {cpu_millis: 32000, memory_bytes: 34359738368}
  disk: {ready: 1, sizes: [4294967296]}
lifecycle:
  policy:
    templates:
      default:
        image: default
        tier: container
        limits: {cpu_millis: 2000, memory_bytes: 4294967296, pids: 512, disk_bytes: 4294967296}
      ten:
        image: default
        tier: container
        limits: {cpu_millis: 2000, memory_bytes: 4294967296, pids: 512, disk_bytes: 10737418240}
    plans:
      default:
        template: default
        templates: []
        idle: 1h
        retention: 720h
        snapshots: {every: 0s, keep_all: 1h, keep_hourly: 24h, keep_daily: 720h}
`

// installation is one berth up in a folder of its own.
type installation struct {
	b      *bench
	dir    string // everything is below it
	store  string // folder of the store, or of the bus's
	kind   string // file or nats
	up     *upproc.Process
	client *sdk.Client
}

func (b *bench) install(ctx context.Context, kind string) (*installation, error) {
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return nil, err
	}
	in := &installation{b: b, dir: dir, kind: kind, store: filepath.Join(dir, "store")}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
		in.remove()
		return nil, err
	}
	return in, ctx.Err()
}

func (in *installation) state() string { return filepath.Join(in.dir, "state") }

func (in *installation) pool() string {
	return filepath.Join(in.state(), "host", "local", "disks")
}

// start starts berth up and logs in.
func (in *installation) start(ctx context.Context) (err error) {
	args := []string{"--config", filepath.Join(in.dir, "config.yaml"), "--metrics", "127.0.0.1:0"}
	if in.kind == "file" {
		args = append(args, "--store", "file://"+in.store)
	}
	if in.b.spans != "" {
		args = append(args, "--spans", in.b.spans)
	}
	in.up, err = upproc.Start(ctx, upproc.Options{Bin: in.b.bin, Dir: in.state(), Args: args})
	if err != nil {
		return err
	}
	token, err := in.up.Token(ctx, "acme", "bench")
	if err != nil {
		return err
	}
	in.client, err = sdk.Connect(ctx, sdk.Config{ClientFile: in.up.ClientFile("fe-acme-web"), User: sdk.Token(token), Timeout: patience})
	return err
}

// patience is for the first snapshot of a large disk, which is answered when it is the head.
const patience = 2 * time.Minute

// stop puts what is awake to sleep and ends berth up.
func (in *installation) stop() error {
	if in.client != nil {
		in.client.Close()
		in.client = nil
	}
	if in.up == nil {
		return nil
	}
	err := in.up.Stop()
	in.up = nil
	return err
}

// remove leaves nothing.
func (in *installation) remove() {
	if err := in.stop(); err != nil {
		note("stop berth up: %v", err)
	}
	unmountBelow(in.dir)
	if err := os.RemoveAll(in.dir); err != nil {
		note("remove the folder of the run: %v", err)
	}
}

// unmountBelow unmounts what a berth up that was killed left.
func unmountBelow(dir string) {
	raw, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return
	}
	lines := strings.Split(string(raw), "\n")
	slices.Reverse(lines)
	for _, l := range lines {
		if f := strings.Fields(l); len(f) > 1 && strings.HasPrefix(f[1], dir+"/") {
			note("unmount %s", f[1])
			_ = syscall.Unmount(f[1], syscall.MNT_DETACH)
		}
	}
}

// starts measures the first start, which makes the pool and unpacks the image, and the next.
func (in *installation) starts(ctx context.Context) error {
	began := time.Now()
	if err := in.start(ctx); err != nil {
		return err
	}
	first := time.Since(began)
	if err := in.stop(); err != nil {
		return err
	}
	began = time.Now()
	if err := in.start(ctx); err != nil {
		return err
	}
	again := time.Since(began)
	floor, err := poolFloor(ctx, in.dir)
	if err != nil {
		return err
	}
	in.b.add(figures.Result{Name: "start of berth up that makes the pool of disks and unpacks the image", Value: ms(first), Unit: "ms",
		Floor: ms(floor), FloorOf: "mkfs.xfs and mount of an equal loop file"}, figures.None)
	in.b.add(figures.Result{Name: "start of berth up with a pool", Value: ms(again), Unit: "ms", Floor: ms(floor),
		FloorOf: "mkfs.xfs and mount of an equal loop file"}, figures.None)
	return nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// meters are the totals of the host's snapshots until now.
type meters struct {
	saves, saveSeconds     float64
	frozen                 float64 // seconds
	read, uploaded, object float64
	cpu                    time.Duration // of the whole of berth up
}

func (m meters) since(old meters) meters {
	return meters{m.saves - old.saves, m.saveSeconds - old.saveSeconds, m.frozen - old.frozen, m.read - old.read,
		m.uploaded - old.uploaded, m.object - old.object, m.cpu - old.cpu}
}

// read reads the meters.
func (in *installation) read() (m meters, err error) {
	resp, err := http.Get(in.up.Metrics)
	if err != nil {
		return m, err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		name, value, ok := strings.Cut(lines.Text(), " ")
		if !ok || !strings.HasPrefix(name, "berth_host_disk_") {
			continue
		}
		name, _, _ = strings.Cut(strings.TrimPrefix(name, "berth_host_disk_"), "{")
		if i := strings.LastIndex(value, " "); i >= 0 {
			value = value[:i]
		}
		if _, rest, ok := strings.Cut(lines.Text(), "} "); ok {
			value = rest
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			continue
		}
		switch strings.TrimSuffix(name, "_total") {
		case "save_seconds_count":
			m.saves += v
		case "save_seconds_sum":
			m.saveSeconds += v
		case "frozen_seconds_sum":
			m.frozen += v
		case "read_bytes":
			m.read += v
		case "uploaded_bytes":
			m.uploaded += v
		case "objects":
			m.object += v
		}
	}
	if err := lines.Err(); err != nil {
		return m, err
	}
	m.cpu, err = in.cpu()
	return m, err
}

// cpu is the processor time of berth up, all services in one.
func (in *installation) cpu() (time.Duration, error) {
	raw, err := os.ReadFile(filepath.Join(in.state(), "up.json"))
	if err != nil {
		return 0, err
	}
	var info struct{ PID int }
	if err := json.Unmarshal(raw, &info); err != nil {
		return 0, err
	}
	if raw, err = os.ReadFile(fmt.Sprintf("/proc/%d/stat", info.PID)); err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(raw), ") ")
	f := strings.Fields(rest)
	if len(f) < 13 {
		return 0, io.ErrUnexpectedEOF
	}
	user, _ := strconv.ParseInt(f[11], 10, 64)
	system, _ := strconv.ParseInt(f[12], 10, 64)
	return time.Duration(user+system) * 10 * time.Millisecond, nil // USER_HZ is 100 everywhere
}

// holding is what a folder holds.
type holding struct {
	bytes   int64
	objects int
}

func holds(dir string) (holding, error) { return holdsOf(dir, "") }

// holdsOf counts what has a word in its path.
func holdsOf(dir, word string) (h holding, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // it was just removed
		}
		if err != nil || !d.Type().IsRegular() || !strings.Contains(path, word) {
			return err
		}
		i, err := d.Info()
		if err == nil {
			h.bytes += i.Size()
			h.objects++
		}
		return err
	})
	return h, err
}
