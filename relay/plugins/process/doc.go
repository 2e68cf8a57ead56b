// Package process runs plugins outside of the relay's process: any MCP server that
// speaks newline-delimited JSON-RPC over stdio or a unix socket is one. To the kernel it
// is a plugin like any other (docs/kernel.md).
//
// A plugin is a folder of the plugin directory, named like the plugin:
//
//	NAME/plugin.json   its manifest: what it may offer, nothing else is ever shown
//	NAME/run           an executable, started with its folder as working directory; or
//	NAME/run.sock      a unix socket of a server that somebody else starts
//
//	h := process.New(process.Options{Dir: dir, Kernel: k})
//	go h.Run(ctx)                  // owns every process
//	err = h.Load(ctx, "weather")   // started, checked against its manifest, offered
//	err = h.Unload("weather@1.0.0")
//
// A process that ends, or is killed, is started again with backoff. Its tools stay
// listed; a call that comes meanwhile waits for it within the call's time, and one that
// was in flight fails: it is never sent twice.
package process
