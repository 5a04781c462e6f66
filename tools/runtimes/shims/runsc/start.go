//go:build linux

package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/sys"
	"github.com/containerd/log"
	"google.golang.org/protobuf/encoding/protowire"
)

const (
	sandboxAnnotation = "io.kubernetes.cri.sandbox-id"
	defaultSocketDir  = "/run/containerd/s"
	// shimOOMScore is what gVisor gives its shim: the last process to be killed.
	shimOOMScore = -999
	// socketDirField is BootstrapParams.socket_dir, which containerd 2.4 sends on
	// stdin and the older shim library that gVisor uses does not know.
	socketDirField   = 9
	maxBootstrapSize = 10 << 20
)

// manager is gVisor's manager with a Start of its own.
type manager struct {
	shim.Manager
}

// Start runs in a short-lived process in the task's bundle. It starts the shim of
// the task's sandbox, or finds it running, and returns its address.
func (m *manager) Start(ctx context.Context, id string, opts shim.StartOpts) (shim.BootstrapParams, error) {
	none := shim.BootstrapParams{}
	group, err := sandboxOf("config.json", id)
	if err != nil {
		return none, err
	}
	address, err := socketAddress(ctx, readSocketDir(os.Stdin), opts.Address, group)
	if err != nil {
		return none, err
	}
	result := shim.BootstrapParams{Version: 2, Address: address, Protocol: "ttrpc"}
	listener, err := listen(address)
	if err != nil {
		return none, err
	}
	// The shim library removes the socket that this file names when it ends.
	if err := os.WriteFile("address", []byte(address), 0o644); err != nil {
		return none, fmt.Errorf("record the shim's address: %w", err)
	}
	if listener == nil {
		return result, nil // the sandbox's shim already runs
	}
	defer listener.Close()
	if err := spawn(ctx, id, opts, listener); err != nil {
		_ = shim.RemoveSocket(address)
		return none, err
	}
	return result, nil
}

// spawn starts the long-lived shim process, which inherits the socket.
func spawn(ctx context.Context, id string, opts shim.StartOpts, listener *os.File) error {
	namespace, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the shim's own binary: %w", err)
	}
	args := []string{"-namespace", namespace, "-address", opts.Address, "-id", id}
	if opts.Debug {
		args = append(args, "-debug")
	}
	cmd := exec.Command(self, args...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=2")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.ExtraFiles = []*os.File{listener}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the shim process: %w", err)
	}
	go cmd.Wait()
	err = shim.WritePidFile("shim.pid", cmd.Process.Pid)
	if err == nil {
		err = protectFromOOM(ctx, cmd.Process.Pid)
	}
	if err != nil {
		cmd.Process.Kill()
	}
	return err
}

// protectFromOOM lowers the shim's oom score where the host permits it.
func protectFromOOM(ctx context.Context, pid int) error {
	err := sys.SetOOMScore(pid, shimOOMScore)
	if errors.Is(err, os.ErrPermission) {
		log.G(ctx).WithError(err).Debug("the shim keeps its oom score: no CAP_SYS_RESOURCE")
		return nil
	}
	if err != nil {
		return fmt.Errorf("set the shim's oom score: %w", err)
	}
	return nil
}

// sandboxOf returns the sandbox that the task belongs to: the one its spec names,
// or the task itself.
func sandboxOf(specPath, id string) (string, error) {
	data, err := os.ReadFile(specPath)
	if err != nil {
		return "", fmt.Errorf("read the task's spec: %w", err)
	}
	var spec struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(data, &spec); err != nil {
		return "", fmt.Errorf("parse the task's spec: %w", err)
	}
	if group := spec.Annotations[sandboxAnnotation]; group != "" {
		return group, nil
	}
	return id, nil
}

// socketAddress names the socket of a sandbox's shim: one per containerd,
// namespace and sandbox.
func socketAddress(ctx context.Context, dir, containerd, group string) (string, error) {
	namespace, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return "", err
	}
	name := sha256.Sum256([]byte(filepath.Join(containerd, namespace, group)))
	return fmt.Sprintf("unix://%s/%x", dir, name), nil
}

// listen creates the socket at address. It returns nil when a live shim already
// serves there, and replaces a socket that a dead one left behind.
func listen(address string) (*os.File, error) {
	socket, err := shim.NewSocket(address)
	if err != nil {
		if !shim.SocketEaddrinuse(err) {
			return nil, fmt.Errorf("create the shim's socket: %w", err)
		}
		if shim.CanConnect(address) {
			return nil, nil
		}
		if err := shim.RemoveSocket(address); err != nil {
			return nil, fmt.Errorf("remove a dead shim's socket: %w", err)
		}
		if socket, err = shim.NewSocket(address); err != nil {
			return nil, fmt.Errorf("create the shim's socket after removing a dead one: %w", err)
		}
	}
	file, err := socket.File()
	if err != nil {
		return nil, fmt.Errorf("share the shim's socket: %w", err)
	}
	return file, nil
}

// readSocketDir finds the socket directory in the bootstrap message that
// containerd writes to stdin, or returns the default.
func readSocketDir(r io.Reader) string {
	message, err := io.ReadAll(io.LimitReader(r, maxBootstrapSize))
	if err != nil {
		return defaultSocketDir
	}
	for len(message) > 0 {
		field, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			break
		}
		message = message[n:]
		if field == socketDirField && kind == protowire.BytesType {
			if value, n := protowire.ConsumeString(message); n >= 0 && filepath.IsAbs(value) {
				return value
			}
			break
		}
		if n = protowire.ConsumeFieldValue(field, kind, message); n < 0 {
			break
		}
		message = message[n:]
	}
	return defaultSocketDir
}
