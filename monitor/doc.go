// Package monitor shows what the daemon of this machine measures: live (Watcher, View) and
// from its history (Window). It works on connections to the control socket.
//
//	w := &monitor.Watcher{Socket: path, Modules: modules}
//	err := w.Run(ctx, func(ctx context.Context, msgs <-chan monitor.Message) error { ... })
//
//	h := monitor.Window{Client: cl, FromMS: from, ToMS: to}
//	err := h.Export(ctx, os.Stdout, "csv")
//
// What is drawn, in which order, under which label and on which scale, follows from the
// sensor catalogue (prober.Sensors). A daemon that is newer than this program may report
// values that its catalogue does not have; they are shown by their keys.
//
// Nothing here changes the daemon, with two exceptions that Watcher's users accept: a client
// that takes events turns push on, and an interval below the daemon's is a burst for all.
//
// Errors of the daemon and of the connection are those of package control: ErrNotRunning,
// ErrPermission, *control.Error. Texts from the daemon are made safe before they reach a
// terminal.
package monitor
