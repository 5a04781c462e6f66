package archive

import "sync"

// distrusted remembers packs that a verification found damaged: the next save of the disk does not
// lean on them, it stores again what they held as long as the image has it. Bounded; what is
// forgotten is found again by the next verification.
type distrusted struct {
	mu    sync.Mutex
	packs map[string]bool // keys of objects
}

const maxDistrusted = 4096

func (t *distrusted) add(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.packs == nil || len(t.packs) >= maxDistrusted {
		t.packs = map[string]bool{}
	}
	t.packs[key] = true
}

// among says which packs are damaged; nil: none.
func (t *distrusted) among(disk Disk, packs []pack) []bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.packs) == 0 {
		return nil
	}
	out, any := make([]bool, len(packs)), false
	for i, p := range packs {
		out[i] = t.packs[disk.pack(p.name)]
		any = any || out[i]
	}
	if !any {
		return nil
	}
	return out
}

// trusts reports whether a chunk of the parent is good.
func (s *saver) trusts(c chunk) bool { return s.bad == nil || !s.bad[c.pack] }
