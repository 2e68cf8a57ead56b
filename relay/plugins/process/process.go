// Package process runs external plugins: any MCP server that speaks newline-delimited
// JSON-RPC over stdio or a unix socket. To the kernel it is like any other plugin
// (docs/kernel.md).
//
// A plugin is a folder of the plugin directory, named like the plugin:
//
//	NAME/plugin.json   its manifest: what it may offer, nothing else is ever shown
//	NAME/run           an executable, started with its folder as working directory, unless the
//	                   manifest has a command; or
//	NAME/run.sock      a unix socket of a server that the relay does not start
//
// The relay starts the executable in a sandbox (package sandbox). If there is a socket
// NAME.sock in Options.SocketDir, a service manager starts it instead, by Serve.
//
//	h := process.New(process.Options{Dir: dir, Kernel: k})
//	go h.Run(ctx)                  // owns every process
//	err = h.Load(ctx, "weather")   // started, checked against its manifest, offered
//	err = h.Unload("weather@1.0.0")
//
// Adopt makes the manifest of a server that was not written for the relay. Its lists are compared
// with the manifest (offer.go), and its URIs are translated (uri.go).
//
// A process that ends, or is killed, is started again with back-off. Its tools stay listed.
// A call that arrives meanwhile waits for it within the call's time; a call that was in
// flight fails and is not sent again.
package process
