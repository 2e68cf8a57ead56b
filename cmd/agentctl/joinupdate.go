package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
)

// A newer binary beside the running one, as `agentctl.new`, waits for the next start. Its
// version is read from its bytes; it is never run.

const (
	maxBinary = 128 << 20
	mainPath  = "agentctl/cmd/agentctl"
)

// stamp is the version in a form that can be found in a binary, set by the linker (make
// build); see stampMark.
var stamp = ""

// stampMark begins a stamp; ";" ends it. It is put together here so that it does not
// stand in the binary a second time.
func stampMark() []byte { return []byte(strings.Join([]string{"agentctl", "version="}, "-")) }

// updateWatch looks at the staged binary.
type updateWatch struct {
	path string
	seen string // what it looked like
}

// newUpdateWatch watches beside the executable; without one it sees nothing.
func newUpdateWatch(executable func() (string, error)) *updateWatch {
	exe, err := executable()
	if err != nil {
		return &updateWatch{}
	}
	return &updateWatch{path: exe + ".new"}
}

// look returns the version of a staged binary that it did not see before, and that is
// another than this one's; "" otherwise.
func (u *updateWatch) look() string {
	st, err := os.Lstat(u.path)
	if err != nil || !st.Mode().IsRegular() || st.Size() > maxBinary {
		return ""
	}
	now := fmt.Sprint(st.ModTime(), st.Size(), st.Sys().(*syscall.Stat_t).Ino)
	if now == u.seen {
		return ""
	}
	u.seen = now
	staged, err := stagedVersion(u.path)
	if err != nil || staged == version || stamp == string(stampMark())+staged+";" {
		return "" // half written, or nothing of ours: it is looked at again when it changes
	}
	return staged
}

// stagedVersion reads the version out of a binary of this program for this machine.
func stagedVersion(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	if err := sameMachine(f); err != nil {
		return "", err
	}
	var s scan
	if err := s.read(f); err != nil {
		return "", err
	}
	switch {
	case !strings.Contains(s.info, "path\t"+mainPath+"\n"):
		return "", fmt.Errorf("%s is no agentctl", path)
	case s.stamp != "":
		return s.stamp, nil
	}
	for line := range strings.SplitSeq(s.info, "\n") { // built by go install
		if f := strings.Split(line, "\t"); len(f) >= 3 && f[0] == "mod" && f[2] != "(devel)" {
			return f[2], nil
		}
	}
	return "", fmt.Errorf("%s does not tell its version", path)
}

// sameMachine compares the head of an ELF file with this process's own: class, byte
// order, machine.
func sameMachine(f *os.File) error {
	var theirs, ours [20]byte
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer func() { _ = self.Close() }()
	if _, err := io.ReadFull(self, ours[:]); err != nil {
		return err
	}
	if _, err := io.ReadFull(f, theirs[:]); err != nil {
		return err
	}
	if !bytes.Equal(theirs[:6], ours[:6]) || theirs[18] != ours[18] || theirs[19] != ours[19] {
		return fmt.Errorf("%s is for another machine", f.Name())
	}
	_, err = f.Seek(0, io.SeekStart)
	return err
}

// scan looks for the stamp and for Go's build information (debug/buildinfo has the
// form) in one pass through a file, in little memory. The package itself would add
// 0.3 MB to the binary.
type scan struct{ stamp, info string }

const (
	buildInfoMagic = "\xff Go buildinf:"
	buildInfoHead  = 32       // before the strings, each with its length in front
	scanPiece      = 64 << 10 // read at a time
	scanOverlap    = 16 << 10 // more than what is looked for is long
)

func (s *scan) read(r io.Reader) error {
	buf := make([]byte, scanPiece+scanOverlap)
	n := 0
	for done := 0; done < maxBinary; {
		m, err := io.ReadFull(r, buf[n:])
		n += m
		s.look(buf[:n])
		if s.stamp != "" && s.info != "" {
			return nil
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			return nil
		}
		if err != nil {
			return err
		}
		copy(buf, buf[n-scanOverlap:n])
		done, n = done+n-scanOverlap, scanOverlap
	}
	return nil
}

func (s *scan) look(b []byte) {
	mark := stampMark()
	for rest := b; s.stamp == ""; {
		i := bytes.Index(rest, mark)
		if i < 0 {
			break
		}
		rest = rest[i+len(mark):]
		if v, _, ok := bytes.Cut(rest[:min(len(rest), 129)], []byte(";")); ok && isVersion(v) {
			s.stamp = string(v)
		}
	}
	for rest := b; s.info == ""; {
		i := bytes.Index(rest, []byte(buildInfoMagic))
		if i < 0 {
			break
		}
		if info := buildInfoOf(rest[i:]); strings.HasPrefix(info, "path\t") {
			s.info = info
		}
		rest = rest[i+1:]
	}
}

// buildInfoOf reads the module information behind the magic, "" when there is none.
func buildInfoOf(b []byte) string {
	if len(b) < buildInfoHead || b[15]&2 == 0 {
		return ""
	}
	_, rest := varString(b[buildInfoHead:]) // Go's version
	info, _ := varString(rest)
	if len(info) < 33 {
		return ""
	}
	return string(info[16 : len(info)-16]) // between two sentinels
}

func varString(b []byte) (s, rest []byte) {
	n, used := binary.Uvarint(b)
	if used <= 0 || n > uint64(len(b)-used) {
		return nil, nil
	}
	return b[used : used+int(n)], b[used+int(n):]
}

// isVersion tells whether b is what a version is made of.
func isVersion(b []byte) bool {
	return len(b) > 0 && len(b) <= 64 && len(bytes.Trim(b, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+~_-")) == 0
}
