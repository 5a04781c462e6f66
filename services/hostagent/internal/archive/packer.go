package archive

import (
	"context"
	"sync"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/ids"
)

// buffers of a save: one fills while the others are uploaded.
const buffers = 3

// packer puts sealed chunks into packs and uploads them while more come. Its memory is bounded: who
// adds to it waits for an upload when every buffer is in use.
type packer struct {
	d     *Depot
	ctx   context.Context
	stop  context.CancelCauseFunc
	disk  Disk
	epoch ids.Epoch
	room  chan []byte // free buffers; an empty one is made when it is used first

	mu    sync.Mutex
	cur   []byte
	packs []pack // in the order of their numbers; the name is known once it is full
	first int    // number of packs[0]
	wg    sync.WaitGroup

	uploaded uint64
	objects  int
}

func (d *Depot) newPacker(ctx context.Context, stop context.CancelCauseFunc, disk Disk, epoch ids.Epoch, first int) *packer {
	p := &packer{d: d, ctx: ctx, stop: stop, disk: disk, epoch: epoch, first: first, room: make(chan []byte, buffers)}
	for range buffers {
		p.room <- nil
	}
	return p
}

// add copies a sealed chunk into a pack and says where it will be.
func (p *packer) add(sealed []byte) (pack, off uint32, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cur != nil && len(p.cur)+len(sealed) > p.d.packSize {
		p.flush()
	}
	if p.cur == nil {
		select {
		case b := <-p.room:
			if b == nil {
				b = make([]byte, 0, p.d.packSize+maxChunk)
			}
			p.cur = b[:0]
		case <-p.ctx.Done():
			return 0, 0, ended(p.ctx)
		}
	}
	off = uint32(len(p.cur))
	p.cur = append(p.cur, sealed...)
	return uint32(p.first + len(p.packs)), off, nil
}

// flush hands the current pack to an upload. The caller holds mu.
func (p *packer) flush() {
	if p.cur == nil {
		return
	}
	b, n := p.cur, len(p.packs)
	p.cur = nil
	p.packs = append(p.packs, pack{size: uint32(len(b))})
	p.wg.Go(func() {
		name, err := p.upload(b)
		if err != nil {
			p.stop(err)
		}
		p.room <- b // before mu: who holds that may be waiting for this buffer
		p.mu.Lock()
		p.packs[n].name = name
		p.uploaded += uint64(len(b))
		p.objects++
		p.mu.Unlock()
	})
}

func (p *packer) upload(b []byte) (packName, error) {
	name := nameOf(p.epoch, b)
	if err := p.d.fault("save.pack"); err != nil {
		return name, errs.Wrap("save disk", p.disk.String(), err)
	}
	if err := p.d.put(p.ctx, p.disk.pack(name), b); err != nil {
		return name, err
	}
	return name, errs.Wrap("save disk", p.disk.String(), p.d.fault("save.packed"))
}

// finish uploads what is left and waits until all of it has arrived.
func (p *packer) finish() error {
	p.mu.Lock()
	p.flush()
	p.mu.Unlock()
	p.wg.Wait()
	return ended(p.ctx)
}
