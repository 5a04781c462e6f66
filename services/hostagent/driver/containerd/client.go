package containerd

import (
	"context"
	"errors"
	"fmt"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	tasksapi "github.com/containerd/containerd/api/services/tasks/v1"
	versionapi "github.com/containerd/containerd/api/services/version/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
)

const (
	namespace    = "berth"
	namespaceKey = "containerd-namespace"
	pingTime     = 15 * time.Second
	callTime     = 60 * time.Second
	maxMessage   = 16 << 20
)

// client speaks to containerd. Calls wait while it restarts, up to callTime.
type client struct {
	socket     string
	conn       *grpc.ClientConn
	containers containersapi.ContainersClient
	tasks      tasksapi.TasksClient
	events     eventsapi.EventsClient
	version    versionapi.VersionClient
}

func dial(socket string) (*client, error) {
	conn, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true), grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 200 * time.Millisecond},
			MinConnectTimeout: 5 * time.Second,
		}))
	if err != nil {
		return nil, err
	}
	return &client{
		socket: socket, conn: conn, containers: containersapi.NewContainersClient(conn), tasks: tasksapi.NewTasksClient(conn),
		events: eventsapi.NewEventsClient(conn), version: versionapi.NewVersionClient(conn),
	}, nil
}

func (c *client) close() { _ = c.conn.Close() }

func (c *client) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, pingTime)
	defer cancel()
	if _, err := c.version.Version(ctx, &emptypb.Empty{}); err != nil {
		return fmt.Errorf("containerd does not answer: %w", err)
	}
	return nil
}

// in puts the namespace and a deadline on the context of a call.
func in(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(metadata.AppendToOutgoingContext(ctx, namespaceKey, namespace), callTime)
}

// call runs f with the namespace. A call that containerd's death cut off is made once more: each of
// them is idempotent, or answers 'exists' or 'not found' the second time.
func call[Q, R any](ctx context.Context, f func(context.Context, Q, ...grpc.CallOption) (R, error), req Q) (R, error) {
	ctx, cancel := in(ctx)
	defer cancel()
	r, err := f(ctx, req)
	if status.Code(err) == codes.Unavailable && ctx.Err() == nil {
		r, err = f(ctx, req)
	}
	return r, err
}

func isNotFound(err error) bool { return status.Code(err) == codes.NotFound }
func isExists(err error) bool   { return status.Code(err) == codes.AlreadyExists }

// kindOf gives the failures of containerd and of the kernel their kind.
func kindOf(err error) errkind.Kind {
	var e *errs.Error
	if errors.As(err, &e) {
		return e.Kind
	}
	switch {
	case errors.Is(err, unix.EBUSY):
		return errkind.Busy
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENOMEM):
		return errkind.NoCapacity
	}
	var st interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &st) {
		return errs.Kind(err)
	}
	switch st.GRPCStatus().Code() {
	case codes.Unavailable:
		return errkind.Unavailable
	case codes.DeadlineExceeded:
		return errkind.Deadline
	case codes.Canceled:
		return errkind.Canceled
	case codes.NotFound:
		return errkind.NotFound
	case codes.ResourceExhausted:
		return errkind.NoCapacity
	}
	return errkind.Internal
}
