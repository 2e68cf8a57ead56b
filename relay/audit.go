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

// The audit log: STATE/audit.jsonl, one line a decision, 0600, rotated at maxAuditFileSize and
// kept maxAuditFiles files deep. Lines are written at least every auditFlushInterval. What the disk
// does not take waits for it, as long as it fits into maxAuditBuffer, so that no line is cut
// in two; a line beyond that is counted, never waited for.
const (
	maxAuditFileSize   = 16 << 20
	maxAuditFiles      = 4
	auditFlushInterval = 200 * time.Millisecond
	maxAuditBuffer     = 32 << 10
)

type auditLog struct {
	path string

	mu    sync.Mutex // protects the fields below
	file  *os.File   // nil: it could not be opened, or was closed
	buf   []byte     // lines on their way to file, at most maxAuditBuffer
	size  int64      // of file with buf
	lost  uint64
	line  []byte
	lines uint64
}

var errAuditFile = errors.New("it is not a regular file; move it away")

func openAudit(stateDir string) (*auditLog, error) {
	a := &auditLog{path: filepath.Join(stateDir, "audit.jsonl")}
	return a, a.open()
}

// open opens a regular file and nothing else: a link that the directory's owner has put
// there would lead a relay of root's elsewhere, and a pipe would hold it up.
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

// write appends one record. All strings in it are checked words of this product.
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

// appendField appends a JSON member, or nothing for an empty value.
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

// rotateLocked begins a new file. The oldest goes first: that may be the room that what
// waits has been waiting for.
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
	_ = a.open() // else flush tries again
}

// closeLocked closes the file behind what it still takes.
func (a *auditLog) closeLocked() error {
	if a.file == nil {
		return nil
	}
	a.flushLocked()
	a.lost += uint64(bytes.Count(a.buf, newline))
	err := a.file.Close()
	a.file, a.buf = nil, a.buf[:0]
	return err
}

var newline = []byte("\n")

// flushLocked writes what waits; what file does not take goes on waiting.
func (a *auditLog) flushLocked() {
	if a.file == nil || len(a.buf) == 0 {
		return
	}
	n, _ := a.file.Write(a.buf) // the next one says whether the disk has room again
	a.buf = a.buf[:copy(a.buf, a.buf[n:])]
}

func (a *auditLog) flush() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == nil && a.open() != nil { // it may be possible again
		return
	}
	a.flushLocked()
}

// run flushes until ctx ends, and once more then.
func (a *auditLog) run(ctx context.Context) {
	t := time.NewTicker(auditFlushInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			a.flush()
			return
		case <-t.C:
			a.flush()
		}
	}
}

func (a *auditLog) close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closeLocked()
}

func (a *auditLog) stats() (lines, lost uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lines, a.lost
}
