package natsblob

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nats.go"
)

// clear removes chunks that belong to no object, now or as soon as the bus
// answers again. What a process leaves that ends before, Tidy finds.
func (b *bucket) clear(nuid string) {
	if b.nc.IsConnected() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
		defer cancel()
		if _, err := b.purge(ctx, b.chunkSubject(nuid), 0); err == nil {
			return
		}
	}
	b.leave(nuid)
}

func (b *bucket) leave(nuid string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.leftover[nuid] = struct{}{}
	if !b.sweeping {
		b.sweeping = true
		go b.clearLeftovers()
	}
}

func (b *bucket) clearLeftovers() {
	back := b.nc.StatusChanged(nats.CONNECTED)
	defer b.nc.RemoveStatusListener(back)
	for wait := time.Second; ; wait = min(2*wait, time.Minute) {
		b.mu.Lock()
		todo := slices.Collect(maps.Keys(b.leftover))
		if len(todo) == 0 {
			b.sweeping = false
			b.mu.Unlock()
			return
		}
		b.mu.Unlock()
		if b.clearAll(todo) {
			continue
		}
		select {
		case <-b.closed:
			return
		case <-back:
		case <-time.After(wait):
		}
	}
}

func (b *bucket) clearAll(nuids []string) bool {
	for _, nuid := range nuids {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
		_, err := b.purge(ctx, b.chunkSubject(nuid), 0)
		cancel()
		if err != nil {
			b.log.Warn("chunks of a failed write cannot be removed yet", "store", b.name, "error", err)
			return false
		}
		b.mu.Lock()
		delete(b.leftover, nuid)
		b.mu.Unlock()
	}
	return true
}

// Store is what an open bucket has beyond gocloud's methods; its As gives it.
type Store struct{ b *bucket }

// Tidy removes the chunks that belong to no object and are older than a time,
// which must be longer than any write takes: what killed writers left. It
// returns how many writes it cleared away. It may run on any number of hosts
// at once.
func (s *Store) Tidy(ctx context.Context, older time.Duration) (int, error) {
	const op = "tidy object store"
	b, name := s.b, s.b.name
	chunks, err := b.subjects(ctx, "$O."+name+".C.>")
	if err != nil {
		return 0, errs.Wrap(op, name, err)
	}
	if err := b.eachRecord(ctx, func(o *object) { delete(chunks, b.chunkSubject(o.NUID)) }); err != nil {
		return 0, errs.Wrap(op, name, err)
	}
	n := 0
	for subject := range chunks {
		orphan, err := b.isOrphan(ctx, subject, older)
		if err != nil {
			return n, errs.Wrap(op, name, err)
		}
		if !orphan {
			continue
		}
		if _, err := b.purge(ctx, subject, 0); err != nil {
			return n, errs.Wrap(op, name, err)
		}
		n++
	}
	return n, nil
}

// isOrphan asks the leader: the records may have come from a replica that lags.
func (b *bucket) isOrphan(ctx context.Context, subject string, older time.Duration) (bool, error) {
	var m stored
	err := b.conn.Read(ctx, "STREAM.MSG.GET."+b.stream, map[string]any{"last_by_subj": subject}, &m)
	if errs.Is(err, errkind.NotFound) {
		return false, nil
	}
	if err != nil || time.Since(m.Message.Time) < older {
		return false, err
	}
	h, err := nats.DecodeHeadersMsg(m.Message.Header)
	if err != nil || h.Get(headerKey) == "" {
		return false, nil // of another client: not ours to judge
	}
	key, err := base64.URLEncoding.DecodeString(h.Get(headerKey))
	if err != nil {
		return false, nil
	}
	o, err := b.record(ctx, string(key))
	switch {
	case errs.Is(err, errkind.NotFound):
		return true, nil
	case err != nil:
		return false, err
	}
	return b.chunkSubject(o.NUID) != subject, nil
}

// subjects returns the subjects of the stream that match, from the leader.
func (b *bucket) subjects(ctx context.Context, filter string) (map[string]uint64, error) {
	all := map[string]uint64{}
	for {
		var page struct {
			Total int `json:"total"`
			State struct {
				Subjects map[string]uint64 `json:"subjects"`
			} `json:"state"`
		}
		req := map[string]any{"subjects_filter": filter, "offset": len(all)}
		if err := b.conn.Read(ctx, "STREAM.INFO."+b.stream, req, &page); err != nil {
			return nil, err
		}
		if len(all) == 0 {
			all = page.State.Subjects
		} else {
			maps.Copy(all, page.State.Subjects)
		}
		if len(page.State.Subjects) == 0 || len(all) >= page.Total {
			if all == nil {
				all = map[string]uint64{}
			}
			return all, nil
		}
	}
}

// eachRecord reads every record from some replica, in batches.
func (b *bucket) eachRecord(ctx context.Context, f func(*object)) error {
	for next := uint64(1); next > 0; {
		from := next
		next = 0
		err := b.batch(ctx, map[string]any{"seq": from, "next_by_subj": "$O." + b.name + ".M.>", "batch": 1000, "max_bytes": batchBytes},
			func(m *nats.Msg, seq uint64) {
				next = seq + 1
				o := &object{}
				if json.Unmarshal(m.Data, &o.ObjectInfo) == nil {
					f(o)
				}
			})
		if err != nil {
			return err
		}
	}
	return nil
}

// batch asks a replica for "batch" messages from "seq" on and returns when all
// that it has came. While no replica answers, as during an election, or one
// falls silent, what is left is asked for again, until there was nothing for
// the time of a stall.
func (b *bucket) batch(ctx context.Context, req map[string]any, each func(m *nats.Msg, seq uint64)) error {
	req = maps.Clone(req)
	left, _ := req["batch"].(int)
	last := time.Now()
	for pause := askAgain; ; pause = min(2*pause, askAgainMost) {
		err := b.ask(ctx, req, func(m *nats.Msg, seq uint64) {
			left--
			req["seq"], req["batch"] = seq+1, left
			last, pause = time.Now(), askAgain
			each(m, seq)
		})
		if err == nil || left == 0 {
			return nil
		}
		again := errors.Is(err, nats.ErrNoResponders) || errors.Is(err, context.DeadlineExceeded)
		if !again || ctx.Err() != nil || time.Since(last) > stall {
			return failed("read object store", b.name, err)
		}
		select {
		case <-ctx.Done():
			return failed("read object store", b.name, err)
		case <-time.After(pause):
		}
	}
}

// ask is batch without patience.
func (b *bucket) ask(ctx context.Context, req map[string]any, each func(m *nats.Msg, seq uint64)) error {
	body, err := json.Marshal(req)
	if err != nil {
		return err
	}
	inbox := b.nc.NewInbox()
	sub, err := b.nc.SubscribeSync(inbox)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	if err := b.nc.PublishRequest("$JS.API.DIRECT.GET."+b.stream, inbox, body); err != nil {
		return err
	}
	for {
		wait, cancel := context.WithTimeout(ctx, replicaStall)
		m, err := sub.NextMsgWithContext(wait)
		cancel()
		if err != nil {
			return err
		}
		if end, err := isEnd(m); end || err != nil {
			return err
		}
		seq, err := strconv.ParseUint(m.Header.Get("Nats-Sequence"), 10, 64)
		if err != nil {
			return err
		}
		each(m, seq)
	}
}

// isEnd reports whether a batch is over; of one that found nothing there is no
// other end.
func isEnd(m *nats.Msg) (bool, error) {
	switch status := m.Header.Get("Status"); status {
	case "":
		return false, nil
	case "204", "404":
		return true, nil
	case "503":
		return true, nats.ErrNoResponders
	default:
		return true, fmt.Errorf("the bus answers %s %s", status, strings.ToLower(m.Header.Get("Description")))
	}
}
