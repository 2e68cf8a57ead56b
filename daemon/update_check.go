package daemon

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A newer binary is staged beside the running one, as agentctl.new, and used from the next
// start. Its version is read from its bytes, without running it, from one of two places:
//
//   - a stamp, which the linker sets in main (make build): agentctl-version=VERSION;agentctl-built=UNIX;
//     where older builds lack the second part, the time of the commit;
//   - Go's build information, as debug/buildinfo describes it: the version of the module
//     for a binary of `go install`, and the path of the main package.
//
// The package debug/buildinfo itself would add 0.3 MB to the binary.

const (
	maxBinary = 128 << 20 // bytes of a binary that are read
	mainPath  = "agentctl/cmd/agentctl"
)

// stampPrefix begins a stamp; ";" ends it. It is joined at run time so that the running
// binary contains it once, in its own stamp.
func stampPrefix() []byte { return []byte(strings.Join([]string{"agentctl", "version="}, "-")) }

// updateCheck looks for a staged binary.
//
// One goroutine uses it. Each file is examined once: seen has its time, size and inode.
type updateCheck struct {
	path    string // of the staged binary; "" checks nothing
	running Build
	seen    string // identifies the file that was examined last
}

// newUpdateCheck checks beside the executable.
func newUpdateCheck(executable func() (string, error), running Build) *updateCheck {
	exe, err := executable()
	if err != nil {
		return &updateCheck{}
	}
	return &updateCheck{path: exe + ".new", running: running}
}

// newVersion returns the version of a staged binary that was not examined before and is newer
// than the running one; "" otherwise.
func (u *updateCheck) newVersion() string {
	st, err := os.Lstat(u.path)
	if err != nil || !st.Mode().IsRegular() || st.Size() > maxBinary {
		return ""
	}
	file := fmt.Sprint(st.ModTime(), st.Size(), st.Sys().(*syscall.Stat_t).Ino)
	if file == u.seen {
		return ""
	}
	u.seen = file
	staged, err := stagedVersion(u.path)
	if err != nil || !isNewer(staged, u.running) {
		return "" // a partly written file is examined again when it changes
	}
	return staged.Version
}

// stagedVersion reads the version, and where it is known the time, out of a binary of this program
// for this machine.
//
// The file may be anything that somebody could write into the directory of the binary, so that
// it is opened without following links and without blocking on a FIFO, and all sizes in it
// are checked.
func stagedVersion(path string) (b Build, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return b, err
	}
	defer func() { _ = f.Close() }()
	if err := sameMachine(f); err != nil {
		return b, err
	}
	var s binaryScan
	if err := s.read(f); err != nil {
		return b, err
	}
	if !strings.Contains(s.info, "path\t"+mainPath+"\n") {
		return b, fmt.Errorf("%s is not agentctl", path)
	}
	b.Version = s.stamp
	if s.built > 0 {
		b.Time = time.Unix(s.built, 0)
	}
	for line := range strings.SplitSeq(s.info, "\n") { // built by go install
		f := strings.Split(line, "\t")
		if len(f) >= 3 && f[0] == "mod" && f[2] != "(devel)" && b.Version == "" {
			b.Version = f[2]
		}
		if text, ok := strings.CutPrefix(line, "build\tvcs.time="); ok && b.Time.IsZero() {
			b.Time, _ = time.Parse(time.RFC3339, text) // zero when it is not one
		}
	}
	if b.Version == "" {
		return b, fmt.Errorf("%s does not contain its version", path)
	}
	return b, nil
}

// sameMachine compares the head of an ELF file with this process's own: magic, class and
// byte order are bytes 0 to 5, the machine bytes 18 and 19 (elf(5)).
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

// binaryScan finds the stamp and the build information in one pass through a file, in
// little memory.
type binaryScan struct {
	stamp, info string
	built       int64 // Unix time of the stamp; 0: none
}

// builtPrefix begins the second part of a stamp, the Unix time of the commit.
var builtPrefix = []byte("agentctl-built=")

const (
	buildInfoMagic  = "\xff Go buildinf:"
	buildInfoHeader = 32       // bytes before the strings, each of which has its length in front
	scanPiece       = 64 << 10 // bytes read at a time
	scanOverlap     = 16 << 10 // bytes kept of the previous piece; longer than any searched text
)

// read scans a file piece by piece. The end of each piece is scanned again with the next
// one, so that a text across the border is found.
func (s *binaryScan) read(r io.Reader) error {
	buf := make([]byte, scanPiece+scanOverlap)
	n := 0
	for done := 0; done < maxBinary; {
		m, err := io.ReadFull(r, buf[n:])
		n += m
		s.search(buf[:n])
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

// search looks for the texts that were not found yet. An invalid match may be part of the
// program's code, so the search continues after it.
func (s *binaryScan) search(b []byte) {
	mark := stampPrefix()
	for rest := b; s.stamp == ""; {
		i := bytes.Index(rest, mark)
		if i < 0 {
			break
		}
		rest = rest[i+len(mark):]
		if v, _, ok := bytes.Cut(rest[:min(len(rest), 129)], []byte(";")); ok && isVersion(v) {
			s.stamp = string(v)
			if t, ok := bytes.CutPrefix(rest[len(v)+1:], builtPrefix); ok {
				t, _, _ := bytes.Cut(t[:min(len(t), 20)], []byte(";"))
				s.built, _ = strconv.ParseInt(string(t), 10, 64) // 0 when it is not one
			}
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
//
// Bit 1 of byte 15 says that the strings are inline, as Go writes them since 1.18. The module
// information has 16 bytes of sentinel before and after it.
func buildInfoOf(b []byte) string {
	if len(b) < buildInfoHeader || b[15]&2 == 0 {
		return ""
	}
	_, rest := varString(b[buildInfoHeader:]) // Go's version
	info, _ := varString(rest)
	if len(info) < 33 {
		return ""
	}
	return string(info[16 : len(info)-16]) // without the sentinels around it
}

// varString splits a string with its length in front as a varint (encoding/binary).
func varString(b []byte) (s, rest []byte) {
	n, used := binary.Uvarint(b)
	if used <= 0 || n > uint64(len(b)-used) {
		return nil, nil
	}
	return b[used : used+int(n)], b[used+int(n):]
}

// isVersion reports whether b has the characters of a version.
func isVersion(b []byte) bool {
	return len(b) > 0 && len(b) <= 64 && len(bytes.Trim(b, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.+~_-")) == 0
}
