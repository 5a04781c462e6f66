//go:build linux

// Command containerd-shim-berthrunsc-v1 is gVisor's shim with three changes: it
// holds the standard streams of every task from Create to Delete (see package
// hold), it starts on hosts without CAP_SYS_RESOURCE, where the stock shim refuses
// because it may not lower its own oom_score_adj, and it answers Shutdown while
// other containers of its sandbox live, where the stock shim breaks the call.
//
// It runs one process per sandbox: tasks that carry the annotation
// io.kubernetes.cri.sandbox-id of an existing task join its shim.
package main

import (
	"context"

	sandbox "github.com/containerd/containerd/api/runtime/sandbox/v1"
	task "github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"
	gvisor "gvisor.dev/gvisor/pkg/shim/v1"

	"github.com/berth-dev/berth/tools/runtimes/shims/hold"
)

const runtimeName = "io.containerd.berthrunsc.v1"

func main() {
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       "task",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn:   newService,
	})
	shim.Run(context.Background(), &manager{Manager: gvisor.NewShimManager(runtimeName)})
}

// service is gVisor's task service with held streams.
type service struct {
	task.TaskService
	held hold.Holder
}

func newService(ic *plugin.InitContext) (any, error) {
	publisher, err := ic.GetByID(plugins.EventPlugin, "publisher")
	if err != nil {
		return nil, err
	}
	stop, err := ic.GetByID(plugins.InternalPlugin, "shutdown")
	if err != nil {
		return nil, err
	}
	stock, err := gvisor.NewShimRedirector(ic.Context, publisher.(shim.Publisher), stop.(shutdown.Service))
	if err != nil {
		return nil, err
	}
	return &service{TaskService: stock}, nil
}

// RegisterTTRPC serves this service, not the one it wraps.
func (s *service) RegisterTTRPC(server *ttrpc.Server) error {
	task.RegisterTaskService(server, s)
	if sandboxes, ok := s.TaskService.(sandbox.TTRPCSandboxService); ok {
		sandbox.RegisterTTRPCSandboxService(server, sandboxes)
	}
	return nil
}

// Create begins to hold the task's streams, then creates it.
func (s *service) Create(ctx context.Context, r *task.CreateTaskRequest) (*task.CreateTaskResponse, error) {
	if err := s.held.Open(r.ID, r.Stdin, r.Stdout, r.Stderr); err != nil {
		return nil, err
	}
	resp, err := s.TaskService.Create(ctx, r)
	if err != nil {
		s.held.Release(r.ID)
	}
	return resp, err
}

// CloseIO gives the container end of file on its input, because it was asked to.
func (s *service) CloseIO(ctx context.Context, r *task.CloseIORequest) (*emptypb.Empty, error) {
	if r.ExecID == "" && r.Stdin {
		s.held.CloseInput(r.ID)
	}
	return s.TaskService.CloseIO(ctx, r)
}

// Delete deletes the task, then lets go of its streams.
func (s *service) Delete(ctx context.Context, r *task.DeleteRequest) (*task.DeleteResponse, error) {
	resp, err := s.TaskService.Delete(ctx, r)
	if err == nil && r.ExecID == "" {
		s.held.Release(r.ID)
	}
	return resp, err
}

// Shutdown ends the shim if it has no tasks left. While it has some, the stock
// service answers neither with a message nor with an error, which the transport
// refuses to send, and containerd then fails the Delete that led to the call.
func (s *service) Shutdown(ctx context.Context, r *task.ShutdownRequest) (*emptypb.Empty, error) {
	resp, err := s.TaskService.Shutdown(ctx, r)
	if resp == nil && err == nil {
		resp = &emptypb.Empty{}
	}
	return resp, err
}
