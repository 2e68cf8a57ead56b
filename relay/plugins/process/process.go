// Package process runs external plugins: MCP servers in other processes, which speak JSON-RPC, one
// message a line, over stdio or a Unix socket. To the kernel such a plugin is like any other
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
//	go h.Run(ctx)                        // owns every process
//	state, err := h.Load(ctx, "weather") // started, checked against its manifest, offered
//	err = h.Unload(ctx, "weather@1.0.0")
//
// A process that ends, or is killed, is started again with back-off. Its tools stay listed.
// A call that arrives meanwhile waits for it within the call's time; a call that was in
// flight fails and is not sent again.
//
// # Files
//
//	host.go         Host: load, reload, unload
//	plugin.go       Plugin, one version: its calls and reads, and its state
//	supervise.go    starts it again; liveness.go finds out that it hangs
//	conn.go         a connection: handshake, lists, progress; line_channel.go its framing and bounds
//	line_logger.go  what a program prints, as lines of the log; text.go makes texts of servers safe
//	offer.go        compares the server's lists with the manifest
//	prompts.go      MCP methods that the kernel does not know; uri.go translates URIs
//	watches.go      subscriptions to resources
//	manifest*.go    plugin.json and its checks; schema.go those of arguments and results
//	folder.go       who may write a plugin's files, and how it is reached
//	program.go      what is started; spawn.go starts it, or bundled.go a part of this binary
//	serve.go        the main process of a plugin that is a service
//	bus*.go         requests of a plugin to the relay
//	adopt.go        makes the manifest of a server that was not written for the relay; npm.go
//	                installs it, in the Stage of stage.go
package process
