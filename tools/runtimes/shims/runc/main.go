//go:build linux

// Command containerd-shim-berthrunc-v1 is containerd's runc shim with one
// addition: it holds the standard streams of every task from Create to Delete,
// so that the channel to the guest agent outlives the host process that uses it.
// See package hold for what exactly is guaranteed.
//
// It runs one process per sandbox: tasks that carry the annotation
// io.kubernetes.cri.sandbox-id of an existing task join its shim. A host without
// CAP_SYS_RESOURCE needs no special care here: this shim only ever raises its
// oom_score_adj above that of containerd, which the kernel allows to everyone.
package main

import (
	"context"

	task "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/manager"
	runctask "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2/task"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/containerd/v2/plugins"
	"github.com/containerd/plugin"
	"github.com/containerd/plugin/registry"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/berth-dev/berth/tools/runtimes/shims/hold"
)

const runtimeName = "io.containerd.berthrunc.v1"

func main() {
	registry.Register(&plugin.Registration{
		Type:     plugins.TTRPCPlugin,
		ID:       "task",
		Requires: []plugin.Type{plugins.EventPlugin, plugins.InternalPlugin},
		InitFn:   newService,
	})
	shim.RunShim(context.Background(), manager.NewShimManager(runtimeName))
}

// service is the stock task service with held streams.
type service struct {
	task.TTRPCTaskService
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
	stock, err := runctask.NewTaskService(ic.Context, publisher.(shim.Publisher), stop.(shutdown.Service))
	if err != nil {
		return nil, err
	}
	return &service{TTRPCTaskService: stock}, nil
}

// RegisterTTRPC serves this service, not the one it wraps.
func (s *service) RegisterTTRPC(server *ttrpc.Server) error {
	task.RegisterTTRPCTaskService(server, s)
	return nil
}

// Create begins to hold the task's streams, then creates it.
func (s *service) Create(ctx context.Context, r *task.CreateTaskRequest) (*task.CreateTaskResponse, error) {
	if err := s.held.Open(r.ID, r.Stdin, r.Stdout, r.Stderr); err != nil {
		return nil, err
	}
	resp, err := s.TTRPCTaskService.Create(ctx, r)
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
	return s.TTRPCTaskService.CloseIO(ctx, r)
}

// Delete deletes the task, then lets go of its streams.
func (s *service) Delete(ctx context.Context, r *task.DeleteRequest) (*task.DeleteResponse, error) {
	resp, err := s.TTRPCTaskService.Delete(ctx, r)
	if err == nil && r.ExecID == "" {
		s.held.Release(r.ID)
	}
	return resp, err
}
