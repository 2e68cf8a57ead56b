package sse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestAppendEvent(t *testing.T) {
	one := func(b []byte, err error) string {
		if err != nil {
			return "error: " + err.Error()
		}
		return string(b)
	}
	b := func(s string) []byte { return []byte(s) }
	refused := "error: " + ErrField.Error()
	tests := []struct{ name, got, want string }{
		{"metric", one(AppendEvent(nil, "metric", b(`{"a":1}`))), "event: metric\ndata: {\"a\":1}\n\n"},
		{"ping", one(AppendEvent(nil, "ping", b("{}"))), string(pingEvent)},
		{"no type", one(AppendEvent(nil, "", b("x"))), "data: x\n\n"},
		{"empty data", one(AppendEvent(nil, "e", nil)), "event: e\ndata: \n\n"},
		{"no data", one(AppendEvent(nil, "e")), "event: e\n\n"},
		{"two lines", one(AppendEvent(nil, "e", b("1"), b("2"))), "event: e\ndata: 1\ndata: 2\n\n"},
		{"behind others", one(AppendEvent(b("x\n\n"), "e", b("1"))), "x\n\nevent: e\ndata: 1\n\n"},
		{"id", one(AppendEventID(nil, b("17"), "log/level", b("{}"))), "id: 17\nevent: log/level\ndata: {}\n\n"},
		{"LF in data", one(AppendEvent(nil, "e", b("1\n\nevent: close"))), refused},
		{"CR in data", one(AppendEvent(nil, "e", b("1\rid: 9"))), refused},
		{"CR in second line", one(AppendEvent(nil, "e", b("1"), b("\r"))), refused},
		{"LF in type", one(AppendEvent(nil, "e\ndata: x", b("1"))), refused},
		{"CR in type", one(AppendEvent(nil, "e\r", b("1"))), refused},
		{"LF in id", one(AppendEventID(nil, b("1\n"), "e", b("1"))), refused},
		{"NUL in id", one(AppendEventID(nil, b("1\x00"), "e", b("1"))), refused},
		{"close", one(AppendClose(nil, Normal)), "event: close\ndata: {\"code\":1000,\"reason\":\"normal\"}\n\n"},
		{"close 4408", one(AppendClose(nil, IdleTimeout)), "event: close\ndata: {\"code\":4408,\"reason\":\"idle_timeout\"}\n\n"},
		{"close 4413", one(AppendClose(nil, Backpressure)), "event: close\ndata: {\"code\":4413,\"reason\":\"backpressure\"}\n\n"},
		{"close 4429", one(AppendClose(nil, RateLimited)), "event: close\ndata: {\"code\":4429,\"reason\":\"rate_limited\"}\n\n"},
		{"close 4503", one(AppendClose(nil, DeviceOffline)), "event: close\ndata: {\"code\":4503,\"reason\":\"device_offline\"}\n\n"},
		{"close with a code that is none", one(AppendClose(nil, 4400)), "error: sse: 4400 is not a close code"},
	}
	for _, tt := range tests {
		if tt.got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, tt.got, tt.want)
		}
	}
	dst := []byte("kept")
	if got, err := AppendEventID(dst, b("1"), "e", b("\n")); err == nil || string(got) != "kept" {
		t.Errorf("after an error dst is %q", got)
	}
}

func TestCodeOf(t *testing.T) {
	tests := []struct {
		err  error
		want Code
	}{
		{nil, Normal},
		{context.Canceled, Normal},
		{fmt.Errorf("%w: %w", ErrPeerClosed, io.EOF), Normal},
		{fmt.Errorf("stream: %w", ErrBackpressure), Backpressure},
		{ErrIdle, IdleTimeout},
		{errors.New("else"), Normal},
	}
	for _, tt := range tests {
		if got := CodeOf(tt.err); got != tt.want {
			t.Errorf("%v: got %d, want %d", tt.err, got, tt.want)
		}
	}
}
