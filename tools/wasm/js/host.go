package main

import (
	"bufio"
	"io"
	"os"
	"strings"

	"github.com/dop251/goja"
)

// output is standard output, flushed before anything goes to standard error.
type output struct{ w *bufio.Writer }

func newOutput() *output { return &output{bufio.NewWriterSize(os.Stdout, 16<<10)} }

func (o *output) flush()        { _ = o.w.Flush() }
func (o *output) line(s string) { _, _ = o.w.WriteString(s + "\n") }
func (o *output) text(s string) { _, _ = o.w.WriteString(s) }

// provide puts into the script's world what it can use of the sandbox. An error of the file system
// becomes an exception.
func provide(vm *goja.Runtime, out *output, args []string) {
	set := func(name string, v any) { _ = vm.Set(name, v) }
	say := func(call goja.FunctionCall) goja.Value { out.line(joined(call.Arguments)); return goja.Undefined() }
	complain := func(call goja.FunctionCall) goja.Value {
		out.flush()
		_, _ = os.Stderr.WriteString(joined(call.Arguments) + "\n")
		return goja.Undefined()
	}
	set("console", map[string]any{"log": say, "info": say, "debug": say, "error": complain, "warn": complain})
	set("print", func(call goja.FunctionCall) goja.Value { out.text(joined(call.Arguments)); return goja.Undefined() })
	set("args", args)
	set("env", variables())
	set("exit", func(code int) { vm.Interrupt(ended(code & 0xff)) })
	set("stdin", func() (string, error) { b, err := io.ReadAll(os.Stdin); return string(b), err })
	files(vm, set)
}

func files(vm *goja.Runtime, set func(string, any)) {
	set("readFile", func(path string) (string, error) { b, err := os.ReadFile(path); return string(b), err })
	set("readBytes", func(path string) (goja.ArrayBuffer, error) {
		b, err := os.ReadFile(path)
		return vm.NewArrayBuffer(b), err
	})
	set("writeFile", func(path string, v goja.Value) error { return os.WriteFile(path, content(v), 0o644) })
	set("appendFile", func(path string, v goja.Value) error {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
		if err != nil {
			return err
		}
		_, err = f.Write(content(v))
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		return err
	})
	set("listDir", func(path string) ([]string, error) {
		entries, err := os.ReadDir(path)
		names := make([]string, 0, len(entries))
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names, err
	})
	set("exists", func(path string) bool { _, err := os.Stat(path); return err == nil })
	set("stat", func(path string) (map[string]any, error) {
		st, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		return map[string]any{"size": st.Size(), "isDir": st.IsDir(), "mtimeMs": st.ModTime().UnixMilli()}, nil
	})
	set("mkdir", func(path string) error { return os.MkdirAll(path, 0o755) })
	set("remove", os.RemoveAll)
	set("rename", os.Rename)
}

// environment is the call's, as NAME=value.
var environment []string

func variables() map[string]string {
	out := map[string]string{}
	for _, e := range environment {
		name, value, _ := strings.Cut(e, "=")
		out[name] = value
	}
	return out
}

// content is what a script wants written: bytes of a buffer or typed array, else the text.
func content(v goja.Value) []byte {
	switch x := v.Export().(type) {
	case goja.ArrayBuffer:
		return x.Bytes()
	case []byte:
		return x
	}
	return []byte(v.String())
}

func joined(vs []goja.Value) string {
	parts := make([]string, len(vs))
	for i, v := range vs {
		parts[i] = format(v)
	}
	return strings.Join(parts, " ")
}

// format shows a value as people expect of console.log: text as it is, objects as JSON.
func format(v goja.Value) string {
	o, ok := v.(*goja.Object)
	if !ok {
		return v.String()
	}
	if _, callable := goja.AssertFunction(v); callable || o.ClassName() == "Error" {
		return o.String()
	}
	b, err := o.MarshalJSON()
	if err != nil {
		return o.String()
	}
	return string(b)
}
