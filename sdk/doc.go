// Package sdk is the client of Berth for frontends: it opens a user's session
// and works in it: processes, terminals, files, events.
//
//	c, err := sdk.Connect(ctx, sdk.Config{ClientFile: "client.json"})
//	s, err := c.Open(ctx, sdk.OpenOptions{User: sdk.Token(jwt)})
//	out, err := s.Output(ctx, "python3", "-c", "print(6*7)")
//
// # What it guarantees
//
// Nothing secret is on the bus in the clear: every request is sealed to
// identity, every answer to a key made for it, and every opening of a stream
// is signed with a key that never leaves the session's handle.
//
// A call that timed out is sent again under the same request id, which the
// platform answers with the stored outcome: an open, close or delete happens
// once. A process is started once per [Cmd.Key]. Its output is addressed by
// offset: after a dropped connection the stream is attached again and goes on
// at the byte where it stopped; bytes that the sandbox had to drop are told
// as a [Gap], never left out silently. An exit code is the process's own, or
// the error is an [UnknownExitError].
//
// A session whose host is lost, drained or removed wakes on another host by
// itself, from the last snapshot; its processes do not come along. Streams of
// the old placement end with an [EndedError] as their cause, also when nobody
// is left who could end them; [OpenOptions.OnHandoff] tells as of when the
// files are, and [Session.Reopen] makes the handle good again.
//
// # What an acknowledgement means
//
//   - [Files.Write] returned nil: the file is fsynced on the host that runs the
//     session. It survives a crash of the sandbox, of Berth and of the host,
//     not the loss of the host's disk.
//   - [Session.Checkpoint] or [Session.Close] returned nil: the manifest is
//     committed, and no older state of the disk is ever handed out. What it
//     names is in the store of disks: it survives the loss of the host.
//   - [Session.Import] returned nil: every file is fsynced on the host, as with
//     Write.
//   - Bytes written to a process's standard input are held by the guest when
//     the SDK forgets them; what the process did with them only it can say.
//
// # Errors
//
// Every error of the platform is an [*Error] with a kind of schemas/errkind;
// compare with errors.Is(err, sdk.ErrRefused) and the like. A kind that says
// "retry" ([Error.Retry]) may go well later. Processes end in [*ExitError],
// [*UnknownExitError] or nil.
//
// Handles are safe for concurrent use unless their documentation says
// otherwise. Durations are time.Durations, sizes are bytes.
package sdk
