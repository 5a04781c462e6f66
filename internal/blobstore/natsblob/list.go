package natsblob

import (
	"context"
	"encoding/base64"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	"github.com/nats-io/nuid"
	"gocloud.dev/blob/driver"
	"golang.org/x/sync/errgroup"
)

const (
	defaultPage   = 1000
	listWorkers   = 16 // record look-ups at once
	keptListings  = 4  // listings whose further pages need no names from the server
	opList        = "list objects"
	tokenSplitter = " "
)

// listings keeps the sorted names of listings that have further pages.
type listings struct {
	mu    sync.Mutex
	byID  map[string][]string
	order []string
}

func (l *listings) put(id string, names []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID == nil {
		l.byID = map[string][]string{}
	}
	if _, ok := l.byID[id]; !ok {
		l.order = append(l.order, id)
	}
	l.byID[id] = names
	if len(l.order) > keptListings {
		delete(l.byID, l.order[0])
		l.order = l.order[1:]
	}
}

func (l *listings) get(id string) ([]string, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	names, ok := l.byID[id]
	return names, ok
}

func (l *listings) drop(id string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.byID, id)
	l.order = slices.DeleteFunc(l.order, func(s string) bool { return s == id })
}

// ListPaged implements driver.Bucket. The names come from the leader; objects
// that were deleted since the first page are left out.
func (b *bucket) ListPaged(ctx context.Context, opts *driver.ListOptions) (*driver.ListPage, error) {
	if opts.BeforeList != nil {
		if err := opts.BeforeList(func(any) bool { return false }); err != nil {
			return nil, err
		}
	}
	id, after, _ := strings.Cut(string(opts.PageToken), tokenSplitter)
	names, ok := b.lists.get(id)
	if !ok {
		var err error
		if names, err = b.names(ctx, opts.Prefix); err != nil {
			return nil, failed(opList, opts.Prefix, err)
		}
		id = nuid.Next()
	}
	size := opts.PageSize
	if size <= 0 {
		size = defaultPage
	}
	entries, more := page(names, opts.Prefix, opts.Delimiter, after, len(opts.PageToken) > 0, size)
	out := &driver.ListPage{}
	if more {
		b.lists.put(id, names)
		out.NextPageToken = []byte(id + tokenSplitter + entries[len(entries)-1].Key)
	} else {
		b.lists.drop(id)
	}
	var err error
	if out.Objects, err = b.fill(ctx, entries); err != nil {
		return nil, failed(opList, opts.Prefix, err)
	}
	return out, nil
}

// names returns the names with a prefix in order.
func (b *bucket) names(ctx context.Context, prefix string) ([]string, error) {
	base := "$O." + b.name + ".M."
	found, err := b.subjects(ctx, base+">")
	if err != nil {
		return nil, err
	}
	var names []string
	for subject := range found {
		name, err := base64.URLEncoding.DecodeString(subject[len(base):])
		if err != nil {
			return nil, errs.E(opList, errkind.DataLoss, "", fmt.Sprintf("%.100s is no object's subject", subject))
		}
		if strings.HasPrefix(string(name), prefix) {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	return names, nil
}

// page picks the entries of one page: names after the last entry of the page
// before, those below a delimiter as one folder.
func page(names []string, prefix, delimiter, after string, further bool, size int) (out []*driver.ListObject, more bool) {
	i := 0
	if further {
		i = sort.Search(len(names), func(i int) bool { return names[i] > after })
	}
	for ; i < len(names); i++ {
		entry := &driver.ListObject{Key: names[i]}
		if delimiter != "" {
			if head, _, ok := strings.Cut(names[i][len(prefix):], delimiter); ok {
				entry = &driver.ListObject{Key: prefix + head + delimiter, IsDir: true}
			}
		}
		if further && entry.Key <= after || len(out) > 0 && entry.IsDir && out[len(out)-1].Key == entry.Key {
			continue
		}
		if len(out) == size {
			return out, true
		}
		out = append(out, entry)
	}
	return out, false
}

// fill looks up the objects of a page and leaves out those that are gone.
func (b *bucket) fill(ctx context.Context, entries []*driver.ListObject) ([]*driver.ListObject, error) {
	gone := make([]bool, len(entries))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(listWorkers)
	for i, e := range entries {
		if e.IsDir {
			e.AsFunc = func(any) bool { return false }
			continue
		}
		g.Go(func() error {
			o, err := b.lookup(ctx, e.Key)
			if errs.Is(err, errkind.NotFound) {
				gone[i] = true
				return nil
			}
			if errs.Is(err, errkind.DataLoss) { // it is there, and reading it says what is wrong
				e.AsFunc = func(any) bool { return false }
				return nil
			}
			if err != nil {
				return err
			}
			e.ModTime, e.Size, e.MD5, e.AsFunc = o.ModTime, int64(o.Size), o.md5(), o.as
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	out := entries[:0]
	for i, e := range entries {
		if !gone[i] {
			out = append(out, e)
		}
	}
	return out, nil
}
