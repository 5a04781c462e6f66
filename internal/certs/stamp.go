package certs

import (
	"os"
	"syscall"
)

// stampOf follows links, so that a link that points elsewhere is a change.
func stampOf(path string) (stamp, error) {
	st, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	out := stamp{at: st.ModTime(), size: st.Size()}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok {
		out.node = sys.Ino
	}
	return out, nil
}
