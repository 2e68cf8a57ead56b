// A client of the control socket that shares no code with it: npm's vscode-jsonrpc.
// It does what its test expects and prints one line of JSON.
//
//	node vscode.cjs MODULES SOCKET
"use strict";
const net = require("node:net");
const path = require("node:path");
const rpc = require(path.join(process.argv[2], "vscode-jsonrpc", "node.js"));

const events = [];
let wake = () => {};

async function main() {
  const socket = net.connect(process.argv[3]);
  await new Promise((ok, bad) => socket.once("connect", ok).once("error", bad));
  const c = rpc.createMessageConnection(new rpc.SocketMessageReader(socket), new rpc.SocketMessageWriter(socket));
  c.onNotification((method, params) => {
    events.push({ method, params });
    wake();
  });
  c.onUnhandledNotification((n) => events.push(n));
  c.listen();
  const fails = (method, params) =>
    c.sendRequest(method, params).then(
      () => null,
      (e) => ({ code: e.code, message: e.message, data: e.data }),
    );

  const out = {};
  out.early = await fails("snapshot", {});
  out.hello = await c.sendRequest("hello", {
    app_version: "1.0.0",
    protocol_version: 1,
    token: "<token>",
    capabilities: ["metrics_stream", "burst_mode", "history_query"],
  });
  // Three at once: the library writes them one behind the other.
  [out.snapshot, out.status, out.started] = await Promise.all([
    c.sendRequest("snapshot", {}),
    c.sendRequest("status"),
    c.sendRequest("start", { modules: ["cpu", "memory"] }),
  ]);
  out.config = await c.sendRequest("set_config", {
    base_interval_ms: 1000,
    module_intervals: { cpu: 300, memory: 1200 },
    persist: true,
  });
  out.burst = await c.sendRequest("burst_subscribe", { modules: ["cpu", "net"], interval_ms: 100, ttl_ms: 10000 });
  out.invalid = await fails("burst_subscribe", { interval_ms: 1, ttl_ms: 1 });
  out.unknown = await fails("set_log_level", { level: "debug" });
  await c.sendNotification("nobody_knows_this", { x: 1 });
  while (events.filter((e) => e.method === "metrics").length < 3) await new Promise((ok) => (wake = ok));
  // A long answer comes in parts, with events around it.
  const { items } = await c.sendRequest("query_history", { from_ts: 0, to_ts: 0, modules: ["cpu", "memory"] });
  out.history = [items.length, items[0].ts, items.every((x, i) => i === 0 || x.ts > items[i - 1].ts)];
  out.steps = (await c.sendRequest("query_history", { from_ts: 0, to_ts: 0, step_ms: 60000 })).items.length;
  out.called = await c.sendRequest("call", { tool: "sysecho.01j9zq3v8k5m7n2p4r6s8t0w1x.echo.invoke", arguments: { message: "hi" } });
  out.refused = await fails("call", { tool: "x" });
  while (!events.some((e) => e.method === "update_ready")) await new Promise((ok) => (wake = ok));
  out.stopped = await c.sendRequest("stop");
  out.events = events;
  console.log(JSON.stringify(out));
  c.dispose();
  socket.destroy();
}

setTimeout(() => {
  console.error("no end after 20 s; events so far: " + JSON.stringify(events));
  process.exit(1);
}, 20000).unref();
main().catch((e) => {
  console.error(e);
  process.exit(1);
});
