package mcplocal

import (
	"context"
	"encoding/json"
	"errors"
	"sync"

	"agentctl/control"
	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// board is this machine's daemon as a plugin of the kernel. It dials the control socket
// again after a restart of the daemon.
//
// socket, manifest and streams are set before the kernel loads the board and not changed
// afterwards: a daemon that comes back with other tools is not noticed.
type board struct {
	socket   string
	manifest *kernel.Manifest
	streams  map[string]string // name of the subscribe tool -> name of the snapshot tool

	mu   sync.Mutex      // protects conn
	conn *control.Client // nil when there is none
}

// loadManifest derives the board's manifest from the capabilities of the daemon. Tools of
// a kind that this version does not have are left out: the daemon may be newer.
func (b *board) loadManifest(ctx context.Context) error {
	c, err := b.client(ctx)
	if err != nil {
		return err
	}
	var answer struct {
		NodeID       string                `json:"node_id"`
		Capabilities []manifest.Capability `json:"capabilities"`
	}
	if err := c.Capabilities(ctx, &answer); err != nil {
		return err
	}
	b.manifest = &kernel.Manifest{Name: "device:" + answer.NodeID, Version: "1.0.0", Inline: true, Untrusted: true}
	b.streams = map[string]string{}
	for i := range answer.Capabilities {
		tools, err := manifest.Project(answer.NodeID, &answer.Capabilities[i])
		if err == nil {
			b.addTools(answer.NodeID, tools)
		}
	}
	return nil
}

// addTools adds the tools of one capability. The control socket does not serve streams, so a
// stream is made of snapshots; without a snapshot verb the stream is left out.
func (b *board) addTools(nodeID string, tools []manifest.Tool) {
	snapshot := ""
	for i := range tools {
		if tools[i].Verb.Name == manifest.VerbSnapshot {
			snapshot = tools[i].Canonical
		}
	}
	for i := range tools {
		t := &tools[i]
		if t.Verb.Stream() {
			if snapshot == "" {
				continue
			}
			b.streams[t.Canonical] = snapshot
		}
		input, _ := manifest.Schema(t.Verb.Input)
		output, _ := manifest.Schema(t.Verb.Output)
		b.manifest.Tools = append(b.manifest.Tools, &kernel.Tool{Name: t.Canonical, NodeID: nodeID, ToolInfo: &kernel.ToolInfo{
			Title: t.Verb.Title, Description: t.Verb.Description, InputSchema: input, OutputSchema: output,
			SafetyClass: t.Capability.SafetyClass, Scope: manifest.ScopeForClass(t.Capability.SafetyClass),
			Inspects: t.Kind.ExtraScope == manifest.ScopeBoardsInspect,
			Streams:  t.Verb.Stream(), CheckArguments: func(args []byte) ([]byte, error) { return manifest.CheckArgs(t.Verb.Input, args) },
		}})
	}
}

// Manifest implements kernel.Plugin.
func (b *board) Manifest() *kernel.Manifest { return b.manifest }

// Call implements kernel.Plugin.
func (b *board) Call(ctx context.Context, r *kernel.Request) (*kernel.Result, error) {
	if snapshot, ok := b.streams[r.Target().Name]; ok {
		return b.openStream(ctx, snapshot, r.Arguments)
	}
	out, err := b.call(ctx, r.Target().Name, r.Arguments)
	if err != nil {
		return nil, err
	}
	return &kernel.Result{Structured: out}, nil
}

// call calls a tool of the daemon. A connection that fails is closed, so that the next call
// dials again.
//
// A refusal with a tool's error code keeps the connection. A failed call is not repeated: its
// caller decides whether to call again.
func (b *board) call(ctx context.Context, tool string, args json.RawMessage) (json.RawMessage, error) {
	c, err := b.client(ctx)
	if err != nil {
		return nil, &manifest.Error{Code: manifest.NodeOffline, Message: "the daemon of this board does not answer; see: agentctl doctor", Reason: "socket", Outcome: manifest.NotSent}
	}
	out, err := c.CallTool(ctx, tool, args)
	var refused *control.Error
	switch {
	case err == nil:
		return out, nil
	case errors.As(err, &refused) && refused.ToolCode != "":
		return nil, manifest.E(manifest.Code(refused.ToolCode), "the board refuses this call")
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	b.close()
	return nil, &manifest.Error{Code: manifest.Internal, Message: "the daemon of this board failed to answer", Reason: "socket", Outcome: manifest.OutcomeUnknown}
}

// client returns the open connection, or a new one.
func (b *board) client(ctx context.Context) (*control.Client, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conn != nil {
		select {
		case <-b.conn.Done():
			_ = b.conn.Close()
		default:
			return b.conn, nil
		}
	}
	// The dial holds mu, so that calls at the same time share one connection. It is bounded
	// by the context of the call, and by control's own timeout without a deadline.
	var err error
	if b.conn, err = control.Dial(ctx, b.socket); err != nil {
		b.conn = nil
		return nil, err
	}
	return b.conn, nil
}

// close closes the connection; the next call dials again.
func (b *board) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conn != nil {
		_ = b.conn.Close()
		b.conn = nil
	}
}
