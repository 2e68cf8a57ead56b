package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"agentctl/client"
	"agentctl/cmd/internal/cli"
	"agentctl/control"
	"agentctl/manifest"
	"agentctl/monitor"
	"agentctl/transport/sse"
)

// Every typed error has its exit code and its next step, by the command that met it.
func TestExplain(t *testing.T) {
	tests := []struct {
		command string
		err     error
		code    int
		text    string
	}{
		{"ls", cli.Errorf(cli.ExitApproval, "ask"), cli.ExitApproval, "ask"},
		{"ls", errors.New("boom"), cli.ExitFailure, "boom"},
		{"events tail", fmt.Errorf("TOKEN_FILE: %w", cli.Errorf(cli.ExitUnauthorized, "no token")), cli.ExitUnauthorized, "TOKEN_FILE: no token"},
		{"ls", &client.Error{Status: 401, Code: manifest.SafetyDenied, Message: "no token"}, cli.ExitUnauthorized, "--token-file"},
		{"call x", &client.Error{Status: 503, Code: manifest.NodeOffline, Message: "attic", TraceID: "ab"}, cli.ExitOffline, "agentctl ls (trace ab)"},
		{"call x", &client.Error{Status: 403, Code: manifest.SafetyDenied, Message: "an access rule of this relay refuses this request; ask its operator", TraceID: "ab"}, cli.ExitUnauthorized, "ask its operator (trace ab)"},
		{"plugin reload x", &client.Error{Status: 400, Code: manifest.BadRequest, Message: "tools[1].capability", TraceID: "ab"}, cli.ExitFailure, "tools[1].capability (trace ab)"},
		{"call x", &client.Error{Status: 502}, cli.ExitFailure, "HTTP 502 without an agentctl error; is this an agentctl relay?"},
		{"call x", &client.StreamClosedError{Code: sse.DeviceOffline}, cli.ExitOffline, "went offline"},
		{"call x", context.DeadlineExceeded, cli.ExitTimeout, "--for"},
		{"call x", fmt.Errorf("node attic %w", client.ErrNeverLinked), cli.ExitOffline, "agentctl run --relay"},
		{"call x", &client.TransportError{Kind: client.UntrustedCertificate, Err: errors.New("x")}, cli.ExitFailure, "--ca-file"},
		{"ls", &client.TransportError{Kind: client.TimedOut, Err: errors.New("x")}, cli.ExitTimeout, "the relay"},
		{"tickets ls", &client.Error{Status: 403, Code: manifest.SafetyDenied, Message: "scope"}, cli.ExitUnauthorized, "--scope tickets:read"},
		{"tickets ls", &client.Error{Status: 200, Code: manifest.SafetyDenied, Reason: "self", Message: "somebody else"}, cli.ExitUnauthorized, "somebody else"},
		{"events tail", &client.Error{Status: 401, HadToken: true}, cli.ExitUnauthorized, "events:subscribe"},
		{"events emit", &client.Error{Status: 401, HadToken: true}, cli.ExitUnauthorized, "events:ingest"},
		{"events tail", &client.TransportError{Kind: client.Unreachable, Err: errors.New("x")}, cli.ExitNotRunning, "agentctl events serve"},
		{"events tail", &client.TransportError{Kind: client.TimedOut, Err: errors.New("x")}, cli.ExitFailure, "the event gateway"},
		{"events tail", &client.ProtocolError{What: "odd"}, cli.ExitFailure, "is this the event gateway?"},
		{"status", fmt.Errorf("socket: %w", control.ErrNotRunning), cli.ExitNotRunning, "agentctl run"},
		{"status", fmt.Errorf("socket: %w", control.ErrPermission), cli.ExitUnauthorized, "permission"},
		{"status", context.DeadlineExceeded, cli.ExitTimeout, "journalctl"},
		{"history", &monitor.ModuleError{Name: "gpu"}, cli.ExitUsage, "--modules gpu: the modules are"},
		{"history", &monitor.ColumnError{Key: "wear.x", Module: "wear"}, cli.ExitFailure, "--modules wear"},
		{"history", monitor.ErrNoHistory, cli.ExitFailure, "agentctl status"},
	}
	for _, tt := range tests {
		cmd, _, err := newRoot().Find(strings.Fields(tt.command))
		if err != nil {
			t.Fatal(err)
		}
		got := cli.Explain(cmd, tt.err)
		if got.Code != tt.code || !strings.Contains(got.Error(), tt.text) {
			t.Errorf("%s: %v: exit %d %q, want %d with %q", tt.command, tt.err, got.Code, got, tt.code, tt.text)
		}
	}
	if cli.Explain(newRoot(), nil) != nil {
		t.Error("nil is an error")
	}
}
