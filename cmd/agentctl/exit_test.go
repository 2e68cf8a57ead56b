package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"agentctl/client"
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
		{"ls", exit(exitApproval, "ask"), exitApproval, "ask"},
		{"ls", errors.New("boom"), exitFailure, "boom"},
		{"ls", &client.Error{Status: 401, Code: manifest.SafetyDenied, Message: "no token"}, exitUnauthorized, "--token-file"},
		{"call x", &client.Error{Status: 503, Code: manifest.NodeOffline, Message: "attic", TraceID: "ab"}, exitOffline, "agentctl ls (trace ab)"},
		{"call x", &client.Error{Status: 403, Code: manifest.SafetyDenied, Message: "an access rule of this relay refuses this request; ask its operator", TraceID: "ab"}, exitUnauthorized, "ask its operator (trace ab)"},
		{"plugin reload x", &client.Error{Status: 400, Code: manifest.BadRequest, Message: "tools[1].capability", TraceID: "ab"}, exitFailure, "tools[1].capability (trace ab)"},
		{"call x", &client.Error{Status: 502}, exitFailure, "HTTP 502 without an agentctl error; is this an agentctl relay?"},
		{"call x", &client.StreamClosedError{Code: sse.DeviceOffline}, exitOffline, "went offline"},
		{"call x", context.DeadlineExceeded, exitTimeout, "--for"},
		{"call x", fmt.Errorf("node attic %w", client.ErrNeverLinked), exitOffline, "agentctl run --relay"},
		{"call x", &client.TransportError{Kind: client.UntrustedCertificate, Err: errors.New("x")}, exitFailure, "--ca-file"},
		{"ls", &client.TransportError{Kind: client.TimedOut, Err: errors.New("x")}, exitTimeout, "the relay"},
		{"tickets ls", &client.Error{Status: 403, Code: manifest.SafetyDenied, Message: "scope"}, exitUnauthorized, "--scope tickets:read"},
		{"tickets ls", &client.Error{Status: 200, Code: manifest.SafetyDenied, Reason: "self", Message: "somebody else"}, exitUnauthorized, "somebody else"},
		{"events tail", &client.Error{Status: 401, HadToken: true}, exitUnauthorized, "events:subscribe"},
		{"events emit", &client.Error{Status: 401, HadToken: true}, exitUnauthorized, "events:ingest"},
		{"events tail", &client.TransportError{Kind: client.Unreachable, Err: errors.New("x")}, exitNotRunning, "agentctl events serve"},
		{"events tail", &client.TransportError{Kind: client.TimedOut, Err: errors.New("x")}, exitFailure, "the event gateway"},
		{"events tail", &client.ProtocolError{What: "odd"}, exitFailure, "is this the event gateway?"},
		{"status", fmt.Errorf("socket: %w", control.ErrNotRunning), exitNotRunning, "agentctl run"},
		{"status", fmt.Errorf("socket: %w", control.ErrPermission), exitUnauthorized, "permission"},
		{"status", context.DeadlineExceeded, exitTimeout, "journalctl"},
		{"history", &monitor.ModuleError{Name: "gpu"}, exitUsage, "--modules gpu: the modules are"},
		{"history", &monitor.ColumnError{Key: "wear.x", Module: "wear"}, exitFailure, "--modules wear"},
		{"history", monitor.ErrNoHistory, exitFailure, "agentctl status"},
	}
	for _, tt := range tests {
		cmd, _, err := newRoot().Find(strings.Fields(tt.command))
		if err != nil {
			t.Fatal(err)
		}
		got := explain(cmd, tt.err)
		if got.code != tt.code || !strings.Contains(got.Error(), tt.text) {
			t.Errorf("%s: %v: exit %d %q, want %d with %q", tt.command, tt.err, got.code, got, tt.code, tt.text)
		}
	}
	if explain(newRoot(), nil) != nil {
		t.Error("nil is an error")
	}
}
