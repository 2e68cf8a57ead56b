// Package monitor shows what the daemon of this machine measures: live (Watcher, View) and
// from its history (Window). It works on connections to the control socket.
//
//	w := &monitor.Watcher{Socket: path, Modules: modules}
//	err := w.Run(ctx, func(ctx context.Context, msgs <-chan monitor.Message) error { ... })
//
//	h := monitor.Window{Source: cl, FromMS: from, ToMS: to}
//	err := h.Export(ctx, os.Stdout, "csv")
//
// The sensor catalogue (prober.Sensors) determines which values are drawn, and their order,
// labels and scales. A newer daemon may report values that this program's catalogue lacks;
// they are shown by their keys.
//
// The package does not change the daemon, with two exceptions: a Watcher, as a client with
// events, turns push on, and an interval below the daemon's starts a burst for all clients.
//
// Errors of the daemon and of the connection are those of package control: ErrNotRunning,
// ErrPermission, *control.Error. Texts from the daemon are made safe before they reach a
// terminal.
//
// # Parts
//
// watcher.go keeps the connection and makes a stream of Messages; view.go draws them on a
// terminal. history.go reads a Window of the history and draws charts, and export.go writes it
// as CSV, JSON or YAML. readings.go decodes what the daemon sends, and snapshot.go prints one
// snapshot.
//
// # Goroutines
//
// Watcher.Run works in the goroutine that calls it, and calls show in another. The control client
// calls Watcher.onEvent in a third. A View and a Window belong to the goroutine that uses them.
package monitor
