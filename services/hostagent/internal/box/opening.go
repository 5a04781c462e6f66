package box

import (
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-dev/berth/internal/errs"
	"github.com/berth-dev/berth/schemas/errkind"
	boxv1 "github.com/berth-dev/berth/schemas/gen/berth/box/v1"
	"github.com/berth-dev/berth/schemas/grant"
	"github.com/berth-dev/berth/schemas/ids"
	"github.com/berth-dev/berth/schemas/seal"
	"github.com/berth-dev/berth/schemas/subjects"
)

const opOpen = "open stream"

// decodeRequest reads what is on the bus of an opening.
func decodeRequest(raw []byte) (*boxv1.OpenRequest, error) {
	if len(raw) > maxOpening {
		return nil, errs.Errorf(opOpen, errkind.TooLarge, "the opening is %d bytes long, at most %d are allowed", len(raw), maxOpening)
	}
	req := &boxv1.OpenRequest{}
	if err := proto.Unmarshal(raw, req); err != nil {
		return nil, errs.E(opOpen, errkind.Invalid, "", "the request is no OpenRequest")
	}
	if len(req.GetSealed()) == 0 {
		return nil, errs.E(opOpen, errkind.Invalid, "", "the request holds nothing sealed")
	}
	return req, nil
}

// decodeOpening reads the plain text of an opening.
func decodeOpening(plain []byte) (*boxv1.Opening, error) {
	o := &boxv1.Opening{}
	if err := proto.Unmarshal(plain, o); err != nil {
		return nil, errs.E(opOpen, errkind.Invalid, "", "what is sealed is no Opening")
	}
	if o.GetCredit() > MaxCredit {
		return nil, errs.Errorf(opOpen, errkind.Invalid, "a credit of %d bytes is more than %d", o.GetCredit(), MaxCredit)
	}
	if _, err := seal.ParsePublic(o.GetReplyKey()); err != nil {
		return nil, errs.E(opOpen, errkind.Invalid, "", "the opening has no proper reply key")
	}
	if err := o.GetTime().CheckValid(); err != nil {
		return nil, errs.E(opOpen, errkind.Invalid, "", "the opening has no proper time")
	}
	return o, nil
}

// decodeOperation reads and bounds the operation of an opening.
func decodeOperation(raw []byte) (*boxv1.Operation, error) {
	op := &boxv1.Operation{}
	if err := proto.Unmarshal(raw, op); err != nil {
		return nil, errs.E(opOpen, errkind.Invalid, "", "the operation cannot be read")
	}
	if op.GetOp() == nil {
		return nil, errs.E(opOpen, errkind.Unimplemented, "", "this host does not know that operation")
	}
	return op, checkOperation(op)
}

// input is what the client signed, as this host saw it come.
func input(o *boxv1.Opening, subject string) grant.Opening {
	return grant.Opening{
		Subject: subject, Nonce: o.GetNonce(), Time: o.GetTime().AsTime(), Operation: o.GetOperation(),
		Deliver: o.GetDeliver(), ReplyKey: o.GetReplyKey(), Grant: o.GetGrant(),
	}
}

// client returns the frontend that the claims name, or the operator, if answer and frames go to its own inbox.
func client(c grant.Claims, deliver, reply string) (subjects.Caller, error) {
	who := subjects.Operator()
	if !c.OfOperator() {
		who = subjects.Frontend(c.Tenant, c.Frontend)
	}
	if !who.InInbox(reply) {
		return who, errs.E(opOpen, errkind.Denied, "", "the reply subject is not in the inbox of the grant's holder")
	}
	last := deliver[strings.LastIndexByte(deliver, '.')+1:]
	if !ids.IsToken(last) || deliver != subjects.BoxFrames(who, ids.StreamID(last)) {
		return who, errs.E(opOpen, errkind.Denied, "", "the deliver subject is not in the inbox of the grant's holder")
	}
	return who, nil
}

// mayAnswer reports whether an answer to somebody unknown may go to this subject at all.
func mayAnswer(reply string) bool {
	return strings.HasPrefix(reply, "_INBOX.fe-") || subjects.Operator().InInbox(reply)
}

// checkOperation refuses what is absurd before the guest hears of it.
func checkOperation(op *boxv1.Operation) error {
	switch o := op.GetOp().(type) {
	case *boxv1.Operation_Exec:
		return checkExec(o.Exec)
	case *boxv1.Operation_ExecAttach:
		return checkKey(o.ExecAttach.GetKey())
	case *boxv1.Operation_ReadFile:
		return checkPaths(o.ReadFile.GetUser(), o.ReadFile.GetPath())
	case *boxv1.Operation_WriteFile:
		return checkPaths(o.WriteFile.GetUser(), o.WriteFile.GetPath())
	case *boxv1.Operation_Stat:
		return checkPaths(o.Stat.GetUser(), o.Stat.GetPath())
	case *boxv1.Operation_ListDir:
		if len(o.ListDir.GetAfter()) > maxPath {
			return bad("the name to continue after is too long")
		}
		return checkPaths(o.ListDir.GetUser(), o.ListDir.GetPath())
	case *boxv1.Operation_Move:
		return checkPaths(o.Move.GetUser(), o.Move.GetFrom(), o.Move.GetTo())
	case *boxv1.Operation_Remove:
		return checkPaths(o.Remove.GetUser(), o.Remove.GetPath())
	case *boxv1.Operation_MakeDir:
		return checkPaths(o.MakeDir.GetUser(), o.MakeDir.GetPath())
	case *boxv1.Operation_Watch:
		return checkPaths(o.Watch.GetUser(), o.Watch.GetPath())
	case *boxv1.Operation_Import:
		return checkImport(o.Import.GetPath())
	case *boxv1.Operation_Checkpoint:
		if key := o.Checkpoint.GetKey(); key != "" {
			return checkKey(key)
		}
	}
	return nil
}

func bad(why string) error { return errs.E(opOpen, errkind.Invalid, "", why) }

func checkKey(key string) error {
	if _, err := ids.ParseExecKey(key); err != nil {
		return errs.E(opOpen, errkind.Invalid, "", err)
	}
	return nil
}

func checkPaths(user string, paths ...string) error {
	for _, p := range paths {
		if p == "" || len(p) > maxPath || strings.IndexByte(p, 0) >= 0 {
			return bad("a path must have 1 to 4096 bytes and no NUL")
		}
	}
	return checkUser(user)
}

func checkImport(path string) error {
	if path == "" {
		return nil // the root
	}
	if path[0] != '/' {
		return bad("the path of an import must be absolute")
	}
	return checkPaths("", path)
}

func checkUser(user string) error {
	if len(user) > 128 || strings.IndexByte(user, 0) >= 0 {
		return bad("the user must have at most 128 bytes and no NUL")
	}
	return nil
}

const maxTimeout = 30 * 24 * time.Hour

func checkExec(e *boxv1.Exec) error {
	if err := checkKey(e.GetKey()); err != nil {
		return err
	}
	if len(e.GetArgv()) == 0 || e.GetArgv()[0] == "" {
		return bad("an exec needs a program")
	}
	if len(e.GetArgv())+len(e.GetEnv()) > maxArgs {
		return bad("more than 4096 arguments and variables")
	}
	n := 0
	for _, a := range e.GetArgv() {
		n += len(a) + 1
		if strings.IndexByte(a, 0) >= 0 {
			return bad("an argument holds a NUL")
		}
	}
	for k, v := range e.GetEnv() {
		n += len(k) + len(v) + 2
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
			return bad("a variable's name is empty or holds = or NUL, or its value holds NUL")
		}
	}
	if n > maxText {
		return errs.Errorf(opOpen, errkind.TooLarge, "arguments and variables have %d bytes, at most %d are allowed", n, maxText)
	}
	if len(e.GetCwd()) > maxPath || strings.IndexByte(e.GetCwd(), 0) >= 0 {
		return bad("the working directory must have at most 4096 bytes and no NUL")
	}
	if t := e.GetTimeout(); t != nil && (t.CheckValid() != nil || t.AsDuration() < 0 || t.AsDuration() > maxTimeout) {
		return bad("the time-out must lie between 0 and 30 days")
	}
	if p := e.GetPty(); p != nil {
		if err := checkSize(p); err != nil {
			return err
		}
	}
	return checkUser(e.GetUser())
}

func checkSize(r *boxv1.Resize) error {
	if r.GetRows() > 10000 || r.GetCols() > 10000 {
		return bad("a terminal has at most 10000 rows and columns")
	}
	return nil
}

// decodeFrame reads and bounds one frame of a client.
func decodeFrame(raw []byte) (*boxv1.Frame, error) {
	const op = "read frame"
	if len(raw) > maxFrame {
		return nil, errs.Errorf(op, errkind.TooLarge, "a frame of %d bytes, at most %d are allowed", len(raw), maxFrame)
	}
	f := &boxv1.Frame{}
	if err := proto.Unmarshal(raw, f); err != nil {
		return nil, errs.E(op, errkind.Invalid, "", "a message is no frame")
	}
	if len(f.GetData().GetData()) > MaxChunk {
		return nil, errs.Errorf(op, errkind.TooLarge, "a piece of %d bytes, at most %d are allowed", len(f.GetData().GetData()), MaxChunk)
	}
	return f, nil
}
