package daemon

import (
	"bytes"
	"debug/buildinfo"
	"encoding/binary"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// binaryWith is the head of this test's own binary, and behind it, at an offset, what a
// build leaves in one.
func binaryWith(t *testing.T, at int, info, stampText string) []byte {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(exe)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := make([]byte, at)
	if _, err := io.ReadFull(f, out[:64]); err != nil { // the header of ELF
		t.Fatal(err)
	}
	if info != "" {
		head := make([]byte, buildInfoHeader)
		copy(head, buildInfoMagic)
		head[15] = 2
		out = append(out, head...)
		for _, s := range []string{"go1.26", strings.Repeat("<", 16) + info + strings.Repeat(">", 16)} {
			out = binary.AppendUvarint(out, uint64(len(s)))
			out = append(out, s...)
		}
	}
	return append(out, stampText...)
}

func TestStagedVersion(t *testing.T) {
	const ours = "path\t" + mainPath + "\nmod\tagentctl\t(devel)\t\nbuild\t-tags=x\n"
	mark := string(stampPrefix())
	tests := []struct {
		name, info, stamp, want string
	}{
		{"a release", ours, mark + "v1.2.3-4-gabc;", "v1.2.3-4-gabc"},
		{"with its time", ours, mark + "v1.2.3;agentctl-built=1767225600;", "v1.2.3"},
		{"with a time that is none", ours, mark + "v1.2.3;agentctl-built=soon;", "v1.2.3"},
		{"go install", strings.Replace(ours, "(devel)", "v1.3.0", 1), "", "v1.3.0"},
		{"a stamp that is not one", ours, mark + "\x00\x01;" + mark + "v1.2.3;", "v1.2.3"},
		{"no version", ours, "", ""},
		{"a long version", ours, mark + strings.Repeat("1", 65) + ";", ""},
		{"another program", strings.Replace(ours, mainPath, "example.com/x", 1), mark + "v1.2.3;", ""},
		{"no Go", "", mark + "v1.2.3;", ""},
	}
	for _, tt := range tests {
		for _, at := range []int{64, scanPiece - 20, scanPiece + scanOverlap - 20, 3 * scanPiece} {
			path := filepath.Join(t.TempDir(), "x")
			if err := os.WriteFile(path, binaryWith(t, at, tt.info, tt.stamp), 0o600); err != nil {
				t.Fatal(err)
			}
			if got, err := stagedVersion(path); got.Version != tt.want || (err == nil) != (tt.want != "") || got.Time.IsZero() != (tt.name != "with its time") {
				t.Errorf("%s at %d: %+v, %v; want %q", tt.name, at, got, err, tt.want)
			}
		}
	}
	other := binaryWith(t, 64, ours, mark+"v1;")
	other[18] ^= 1
	path := filepath.Join(t.TempDir(), "x")
	if err := os.WriteFile(path, other, 0o600); err != nil {
		t.Fatal(err)
	}
	if v, err := stagedVersion(path); err == nil {
		t.Errorf("a binary of another machine is %q", v)
	}
}

// TestBuildInfo compares with debug/buildinfo on a real binary.
func TestBuildInfo(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	want, err := buildinfo.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	var s binaryScan
	if err := s.read(bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}
	if wanted := want.String(); !strings.HasSuffix(wanted, s.info) || len(s.info) < 100 {
		t.Errorf("got %q, want %q", s.info, wanted)
	}
}

// TestUpdateCheck checks that a staged binary is reported once, and again when it is replaced.
func TestUpdateCheck(t *testing.T) {
	exe := filepath.Join(t.TempDir(), "agentctl")
	u := newUpdateCheck(func() (string, error) { return exe, nil }, Build{Version: "v1.0.0"})
	stage := func(stamp string) {
		t.Helper()
		next := exe + ".tmp"
		if err := os.WriteFile(next, binaryWith(t, 64, "path\t"+mainPath+"\n"+strings.Repeat("x", 64), stamp), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(next, exe+".new"); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(want string) {
		t.Helper()
		if got := u.newVersion(); got != want {
			t.Errorf("newVersion() = %q, want %q", got, want)
		}
	}
	expect("")
	stage("half written")
	expect("")
	stage(string(stampPrefix()) + "v2.0.0;")
	expect("v2.0.0")
	expect("")
	stage(string(stampPrefix()) + "v1.0.0;")
	expect("") // what runs already
	stage(string(stampPrefix()) + "v0.9.9;")
	expect("") // older
	stage(string(stampPrefix()) + "v2.0.1;")
	expect("v2.0.1")
	if err := os.Remove(exe + ".new"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/zero", exe+".new"); err != nil {
		t.Fatal(err)
	}
	expect("")
}
