package prober

import (
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

func TestHostFacts(t *testing.T) {
	f := HostFacts()
	name, err := os.Hostname()
	if err == nil && f.Hostname != printable(name) {
		t.Errorf("hostname %q, want %q", f.Hostname, name)
	}
	if f.OS == "" || f.Kernel == "" || f.Arch == "" {
		t.Errorf("facts %+v, want os, kernel and arch", f)
	}
	if f.BootTimeMS < 0 || f.BootTimeMS > time.Now().UnixMilli() {
		t.Errorf("boot time %d is not in the past", f.BootTimeMS)
	}
}

func TestFactsOfBoards(t *testing.T) {
	tests := []struct{ tree, os, board string }{
		{"pizero", "Raspbian GNU/Linux 12 (bookworm)", "Raspberry Pi Zero W Rev 1.1"},
		{"quad", "Debian GNU/Linux 13 (trixie)", "Example Boards Quad4"}, // a tab and a letter dropped
		{"container", runtime.GOOS, ""},
	}
	for _, tt := range tests {
		f := hostFacts("testdata/proc/" + tt.tree + "/")
		if f.OS != tt.os || f.Board != tt.board {
			t.Errorf("%s: os %q, board %q, want %q, %q", tt.tree, f.OS, f.Board, tt.os, tt.board)
		}
	}
}

func TestPrintable(t *testing.T) {
	for in, want := range map[string]string{
		" Pi\x00":                 "Pi",
		"\x1b[31mred\r\n":         "[31mred",
		strings.Repeat("a", 1000): strings.Repeat("a", 128),
	} {
		if got := printable(in); got != want {
			t.Errorf("printable(%q) = %q, want %q", in, got, want)
		}
	}
}
