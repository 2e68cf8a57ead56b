package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"agentctl/relay/kernel"
)

// Bounds of the audit log.
const (
	maxAuditFileSize   = 16 << 20 // bytes, then it rotates
	maxAuditFiles      = 4
	maxAuditBuffer     = 32 << 10 // bytes
	auditFlushInterval = 200 * time.Millisecond
)

// auditLog is STATE/audit.jsonl: one JSON line for each decision about a call, mode 0600,
// rotated by size. write copies a line into a buffer that run writes out, so that a call
// waits for the disk only when the buffer is full.
//
//	{"ts":"2026-01-02T03:04:05.678Z","tenant":"default","actor":"ci","tool":"sys.….snapshot",
//	 "node_id":"…","decision":"allowed","trace_id":"…"}
//
// Empty members are left out. Arguments and results are not in it, so that the file holds
// no data of boards or callers.
//
// While the disk takes nothing, lines wait in the buffer. A line that does not fit any more
// is counted as lost; no line is cut in two.
type auditLog struct {
	path string

	mu    sync.Mutex // protects the fields below
	file  *os.File   // nil: could not be opened, or closed
	buf   []byte     // whole lines that file has not taken yet
	size  int64      // of file and buf
	lost  uint64
	line  []byte // reused by write
	lines uint64
}

// errAuditFile refuses a link, a pipe or a directory in the place of the file.
var errAuditFile = errors.New("it is not a regular file; move it away")

// openAudit opens the audit log of a state directory, for appending.
func openAudit(stateDir string) (*auditLog, error) {
	a := &auditLog{path: filepath.Join(stateDir, "audit.jsonl")}
	return a, a.open()
}

// open opens a regular file and nothing else: a symbolic link would lead a relay that runs as
// root elsewhere, and a pipe would block it.
func (a *auditLog) open() error {
	f, err := os.OpenFile(a.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENXIO) {
		err = errAuditFile
	}
	if err != nil {
		return fmt.Errorf("open audit log %s: %w", a.path, err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errAuditFile
	}
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("open audit log %s: %w", a.path, err)
	}
	a.file, a.size = f, st.Size()
	return nil
}

// write appends one record. It runs on every call and allocates nothing in the common case.
func (a *auditLog) write(r *kernel.Record) {
	a.mu.Lock()
	defer a.mu.Unlock()
	b := append(a.line[:0], `{"ts":"`...)
	b = time.Now().UTC().AppendFormat(b, "2006-01-02T15:04:05.000Z")
	b = append(b, '"')
	b = appendField(b, "tenant", r.Tenant)
	b = appendField(b, "actor", r.Actor)
	b = appendField(b, "tool", r.Tool)
	b = appendField(b, "node_id", r.NodeID)
	b = appendField(b, "decision", string(r.Decision))
	b = appendField(b, "code", string(r.Code))
	b = appendField(b, "reason", r.Reason)
	b = appendField(b, "trace_id", r.TraceID)
	b = append(b, "}\n"...)
	a.line = b
	if a.file != nil && a.size+int64(len(b)) > maxAuditFileSize {
		a.rotateLocked()
	}
	if len(a.buf)+len(b) > maxAuditBuffer {
		a.flushLocked()
	}
	if a.file == nil || len(a.buf)+len(b) > maxAuditBuffer {
		a.lost++
		return
	}
	a.buf = append(a.buf, b...)
	a.size += int64(len(b))
	a.lines++
}

// appendField appends a JSON member, or nothing for an empty value. A value of printable
// ASCII, as nearly all are, is copied without encoding/json, which would allocate.
func appendField(b []byte, key, value string) []byte {
	if value == "" {
		return b
	}
	b = append(b, `,"`...)
	b = append(b, key...)
	b = append(b, `":`...)
	for i := 0; i < len(value); i++ {
		if c := value[i]; c < 0x20 || c > 0x7e || c == '"' || c == '\\' {
			quoted, _ := json.Marshal(value) // a string cannot fail
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), value...), '"')
}

// rotateLocked starts a new file: audit.jsonl becomes audit.jsonl.1, and so on. Renaming onto
// the oldest removes it before anything is written: the lines that wait may need its space.
// After a failed rename the old file continues to grow, and is tried again with each line.
func (a *auditLog) rotateLocked() {
	for i := maxAuditFiles - 1; i >= 1; i-- {
		from := a.path
		if i > 1 {
			from += "." + strconv.Itoa(i-1)
		}
		if err := os.Rename(from, a.path+"."+strconv.Itoa(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			a.lost++
		}
	}
	_ = a.closeLocked()
	_ = a.open() // flush tries again
}

// closeLocked flushes and closes the file; lines that it does not take are lost.
func (a *auditLog) closeLocked() error {
	if a.file == nil {
		return nil
	}
	a.flushLocked()
	a.lost += uint64(bytes.Count(a.buf, []byte("\n")))
	err := a.file.Close()
	a.file, a.buf = nil, a.buf[:0]
	return err
}

// flushLocked writes the buffer; what the file does not take stays.
func (a *auditLog) flushLocked() {
	if a.file == nil || len(a.buf) == 0 {
		return
	}
	n, _ := a.file.Write(a.buf) // a full disk may have space next time
	a.buf = a.buf[:copy(a.buf, a.buf[n:])]
}

// flush writes the buffer, after another attempt to open the file if there is none.
func (a *auditLog) flush() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == nil && a.open() != nil {
		return
	}
	a.flushLocked()
}

// run flushes until ctx ends, and once more then.
func (a *auditLog) run(ctx context.Context) {
	every(ctx, auditFlushInterval, a.flush)
	a.flush()
}

// close flushes and closes the file.
func (a *auditLog) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closeLocked()
}

// stats returns how many lines were written or wait, and how many were lost. A rename that
// failed during rotation counts as a loss too, since the oldest lines may be gone.
func (a *auditLog) stats() (lines, lost uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lines, a.lost
}
