package bus

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/berth-dev/berth/schemas/subjects"
	"github.com/nats-io/nats.go/jetstream"
)

// Declaration is what Reconcile brings the bus to. The zero value is nothing;
// Declared returns that of the catalogue.
type Declaration struct {
	Streams      []subjects.Stream
	Buckets      []subjects.Bucket
	ObjectStores []subjects.ObjectStore
	Consumers    []subjects.Consumer
	Replicas     int  // 0 means 1
	Clustered    bool // nothing is written asynchronously, so that one replica can become three in place
}

// Declared is the catalogue's declaration with a number of replicas.
func Declared(replicas int) Declaration {
	return Declaration{
		Streams: subjects.Streams, Buckets: subjects.Buckets, ObjectStores: subjects.ObjectStores,
		Consumers: subjects.Consumers, Replicas: replicas,
	}
}

func declaredBytes() (n int64) {
	for _, s := range subjects.Streams {
		n += s.MaxBytes
	}
	for _, b := range subjects.Buckets {
		n += b.MaxBytes
	}
	for _, o := range subjects.ObjectStores {
		n += o.MaxBytes
	}
	return n
}

// Reconcile creates what is declared and missing, updates settings that
// differ, and fails with one sentence on a setting that cannot be changed in
// place; then what came before it in the declaration is done already. It
// returns one line per change that it made. c must be the keeper.
func Reconcile(ctx context.Context, c *Conn, d Declaration) (changes []string, err error) {
	for _, s := range d.Streams {
		if changes, err = c.assertStream(ctx, d.streamConfig(s), changes); err != nil {
			return changes, err
		}
	}
	for _, b := range d.Buckets {
		if changes, err = c.assertStream(ctx, bucketConfig(b, d.Replicas), changes); err != nil {
			return changes, err
		}
	}
	for _, o := range d.ObjectStores {
		if changes, err = c.assertStream(ctx, objectStoreConfig(o, d.Replicas), changes); err != nil {
			return changes, err
		}
	}
	for _, s := range d.Consumers {
		if changes, err = c.assertConsumer(ctx, s, changes); err != nil {
			return changes, err
		}
	}
	return changes, nil
}

func (d Declaration) streamConfig(s subjects.Stream) jetstream.StreamConfig {
	cfg := jetstream.StreamConfig{
		Name:              s.Name,
		Description:       s.Doc,
		Subjects:          s.Subjects,
		Retention:         jetstream.LimitsPolicy,
		Storage:           jetstream.FileStorage,
		Discard:           jetstream.DiscardOld,
		MaxBytes:          s.MaxBytes,
		MaxMsgSize:        s.MaxMsgSize,
		MaxAge:            s.MaxAge,
		MaxMsgs:           -1,
		MaxConsumers:      -1,
		MaxMsgsPerSubject: -1,
		Duplicates:        s.DuplicateWindow,
		Replicas:          max(d.Replicas, 1),
		AllowDirect:       true,
		AllowMsgSchedules: s.Schedules,
		AllowRollup:       s.Schedules,
	}
	if s.Retention == subjects.WorkQueue {
		cfg.Retention = jetstream.WorkQueuePolicy
	}
	if s.DiscardNew {
		cfg.Discard = jetstream.DiscardNew
	}
	if s.MaxPerSubject > 0 {
		cfg.MaxMsgsPerSubject = s.MaxPerSubject
	}
	// Replicated streams cannot be asynchronous: every append to their log is
	// synced on a majority before it is acknowledged, as BERTH_REQUESTS must be.
	if s.Async && cfg.Replicas == 1 && !d.Clustered {
		cfg.PersistMode = jetstream.AsyncPersistMode
	}
	return cfg
}

// bucketConfig declares the stream below a key-value bucket.
func bucketConfig(b subjects.Bucket, replicas int) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:              "KV_" + b.Name,
		Description:       b.Doc,
		Subjects:          []string{"$KV." + b.Name + ".>"},
		Storage:           jetstream.FileStorage,
		Discard:           jetstream.DiscardNew,
		MaxBytes:          b.MaxBytes,
		MaxMsgSize:        -1,
		MaxMsgs:           -1,
		MaxConsumers:      -1,
		MaxMsgsPerSubject: int64(max(b.History, 1)),
		Duplicates:        2 * time.Minute,
		Replicas:          max(replicas, 1),
		AllowRollup:       true,
		AllowDirect:       true,
		AllowMsgTTL:       true,
		DenyDelete:        false, // secure deletes overwrite single messages
	}
}

// objectStoreConfig declares the stream below an object store: that of
// nats.go's CreateObjectStore, never written asynchronously.
func objectStoreConfig(o subjects.ObjectStore, replicas int) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:              "OBJ_" + o.Name,
		Description:       o.Doc,
		Subjects:          []string{"$O." + o.Name + ".C.>", "$O." + o.Name + ".M.>"},
		Storage:           jetstream.FileStorage,
		Discard:           jetstream.DiscardNew, // a full store refuses; it must never drop the oldest
		MaxBytes:          o.MaxBytes,
		MaxMsgSize:        -1,
		MaxMsgs:           -1,
		MaxConsumers:      -1,
		MaxMsgsPerSubject: -1,
		Duplicates:        2 * time.Minute,
		Replicas:          max(replicas, 1),
		AllowRollup:       true,
		AllowDirect:       true,
	}
}

func consumerConfig(s subjects.Consumer) jetstream.ConsumerConfig {
	cfg := jetstream.ConsumerConfig{
		Durable:       s.Durable,
		Description:   s.Doc,
		DeliverPolicy: jetstream.DeliverAllPolicy,
		AckPolicy:     jetstream.AckExplicitPolicy,
		AckWait:       s.AckWait,
		MaxDeliver:    -1, // the ceiling is kept by Consume, which copies to BERTH_DEAD first
		MaxAckPending: s.MaxPending,
		ReplayPolicy:  jetstream.ReplayInstantPolicy,
		MaxWaiting:    512,
		MemoryStorage: s.Memory,
	}
	if len(s.Filters) == 1 {
		cfg.FilterSubject = s.Filters[0]
	} else {
		cfg.FilterSubjects = s.Filters
	}
	return cfg
}

const declareWait = 4 * time.Second

func (c *Conn) assertStream(ctx context.Context, want jetstream.StreamConfig, changes []string) ([]string, error) {
	op := "declare stream"
	ctx, cancel := context.WithTimeout(ctx, declareWait) // a leader that died answers never
	defer cancel()
	st, err := c.js.Stream(ctx, want.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if _, err := c.js.CreateStream(ctx, want); err != nil {
			return changes, c.declareFailed(op, want.Name, "create it", err)
		}
		return append(changes, "created stream "+want.Name), nil
	}
	if err != nil {
		return changes, c.declareFailed(op, want.Name, "read it", err)
	}
	diff := differences(want, st.CachedInfo().Config)
	if len(diff) == 0 {
		return changes, nil
	}
	if _, err := c.js.UpdateStream(ctx, want); err != nil {
		return changes, c.declareFailed(op, want.Name, "change "+strings.Join(diff, ", ")+" in place", err)
	}
	after, err := c.js.Stream(ctx, want.Name)
	if err != nil {
		return changes, c.declareFailed(op, want.Name, "read it", err)
	}
	if left := differences(want, after.CachedInfo().Config); len(left) > 0 {
		return changes, errs.E(op, errkind.Conflict, want.Name, "the server kept "+strings.Join(left, ", "))
	}
	return append(changes, "changed stream "+want.Name+": "+strings.Join(diff, ", ")), nil
}

func (c *Conn) assertConsumer(ctx context.Context, s subjects.Consumer, changes []string) ([]string, error) {
	op, want := "declare consumer", consumerConfig(s)
	ctx, cancel := context.WithTimeout(ctx, declareWait)
	defer cancel()
	cons, err := c.js.Consumer(ctx, s.Stream, s.Durable)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		if _, err := c.js.CreateConsumer(ctx, s.Stream, want); err != nil {
			return changes, c.declareFailed(op, s.Durable, "create it", err)
		}
		return append(changes, "created consumer "+s.Durable), nil
	}
	if err != nil {
		return changes, c.declareFailed(op, s.Durable, "read it", err)
	}
	have := cons.CachedInfo().Config
	keepStart(&want, have)
	diff := differences(want, have)
	if len(diff) == 0 {
		return changes, nil
	}
	if _, err := c.js.UpdateConsumer(ctx, s.Stream, want); err != nil {
		return changes, c.declareFailed(op, s.Durable, "change "+strings.Join(diff, ", ")+" in place", err)
	}
	return append(changes, "changed consumer "+s.Durable+": "+strings.Join(diff, ", ")), nil
}

// keepStart accepts where an existing consumer once started: a recreated one
// began after its predecessor's last acknowledgement.
func keepStart(want *jetstream.ConsumerConfig, have jetstream.ConsumerConfig) {
	if have.DeliverPolicy == jetstream.DeliverByStartSequencePolicy {
		want.DeliverPolicy, want.OptStartSeq = have.DeliverPolicy, have.OptStartSeq
	}
}

func (c *Conn) declareFailed(op, name, what string, err error) error {
	err = c.failed("", name, err)
	return errs.E(op, errs.Kind(err), name, fmt.Errorf("cannot %s: %w", what, err))
}

// differences lists the declared settings that the server has otherwise, as
// "MaxBytes 1 to 2". Settings that the server fills in by itself (metadata,
// zero values) do not count.
func differences(want, have any) []string {
	w, h := reflect.ValueOf(want), reflect.ValueOf(have)
	var out []string
	for i := range w.NumField() {
		name := w.Type().Field(i).Name
		a, b := w.Field(i), h.Field(i)
		if name == "Metadata" || name == "Name" || name == "Durable" || same(a, b) {
			continue
		}
		out = append(out, fmt.Sprintf("%s %v to %v", name, b.Interface(), a.Interface()))
	}
	return out
}

func same(a, b reflect.Value) bool {
	if a.IsZero() && b.IsZero() {
		return true
	}
	if unset(a) && unset(b) {
		return true
	}
	return reflect.DeepEqual(a.Interface(), b.Interface())
}

// unset treats 0 and -1 alike, as the server does for limits, and empty slices
// like nil.
func unset(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.Int, reflect.Int32, reflect.Int64:
		return v.Int() == 0 || v.Int() == -1
	case reflect.Slice, reflect.Map:
		return v.Len() == 0
	case reflect.Pointer:
		return v.IsNil() || v.Elem().IsZero()
	}
	return v.IsZero()
}
