package cover

import (
	"fmt"
	"strings"
)

// flag begins an argument of a first process that lays files over those of its root itself.
const flag = "-over="

// Args are the arguments that tell a first process of the files.
func Args(list []File) (out []string) {
	for _, f := range list {
		out = append(out, flag+f.From+":"+f.To)
	}
	return out
}

// Arg reads one of the arguments; ok if it is one.
func Arg(arg string) (f File, ok bool, err error) {
	rest, ok := strings.CutPrefix(arg, flag)
	if !ok {
		return f, false, nil
	}
	f.From, f.To, _ = strings.Cut(rest, ":/")
	f.To = "/" + f.To
	if f.From == "" || f.From == "." || f.From == ".." || strings.Contains(f.From, "/") || f.To == "/" {
		return f, true, fmt.Errorf("%.300q names no file and its place", arg)
	}
	return f, true, nil
}
