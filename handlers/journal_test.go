package handlers

import (
	"bufio"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"agentctl/manifest"
)

// TestJournal checks what a call makes of the helper's answers. Package journal tests the helper.
func TestJournal(t *testing.T) {
	page := `{"lines":[{"ts_ms":1893456000000,"unit":"ssh.service","priority":"err","message":"hi"}],"next_cursor":"s=1"}`
	tests := []struct {
		name, args, answer string
		want               manifest.Code // "" is success
	}{
		{"a page", `{"unit":"ssh"}`, page, ""},
		{"another version's page", `{}`, `{"lines":[],"hint":1}`, manifest.Internal},
		{"no JSON", `{}`, `lines`, manifest.Internal},
		{"nothing", `{}`, ``, manifest.Internal},
		{"a window that ends before it begins", `{"from_ms":2,"to_ms":2}`, page, manifest.ManifestInvalid},
		{"a cursor that is gone", `{"cursor":"s=1"}`, `{"error":{"code":"cursor","text":"no"}}`, manifest.ManifestInvalid},
		{"journalctl fails", `{}`, `{"error":{"code":"failed","text":"no"}}`, manifest.Internal},
		{"silence", `{}`, "-", manifest.DeadlineExceeded},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "s")
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = l.Close() }()
			requests := make(chan string, 1)
			go func() {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				defer func() { _ = conn.Close() }()
				line, _ := bufio.NewReader(conn).ReadString('\n')
				requests <- line
				if tt.answer == "-" {
					_, _ = conn.Read(make([]byte, 1))
					return
				}
				_, _ = conn.Write([]byte(tt.answer + "\n"))
			}()
			patience := time.Minute // the machine may be slow
			if tt.want == manifest.DeadlineExceeded {
				patience = pageReserve + helperReserve + 200*time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			got, _, err := NewJournal(socket).Call(ctx, manifest.ToolName{}, []byte(tt.args))
			var e *manifest.Error
			switch {
			case tt.want == "" && (err != nil || string(got) != page):
				t.Errorf("got %s, %v", got, err)
			case tt.want == "":
				if r := <-requests; !strings.HasPrefix(r, `{"unit":"ssh","limit":50,"timeout_ms":`) {
					t.Errorf("asked %s", r)
				}
			case !errors.As(err, &e) || e.Code != tt.want:
				t.Errorf("got %s, %v, want %s", got, err, tt.want)
			}
		})
	}
	var e *manifest.Error
	gone := filepath.Join(t.TempDir(), "gone")
	if _, _, err := NewJournal(gone).Call(t.Context(), manifest.ToolName{}, []byte("{}")); !errors.As(err, &e) || e.Code != manifest.Internal || HasSocket(gone) {
		t.Errorf("no socket: %v", err)
	}
	if err := os.WriteFile(gone, nil, 0o600); err != nil || HasSocket(gone) {
		t.Errorf("a file counts as a socket, %v", err)
	}
}
