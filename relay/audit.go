package relay

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"agentctl/relay/kernel"
)

// The audit log: STATE/audit.jsonl, one line a decision, 0600, rotated at auditSize and
// kept auditKeep files deep. Lines are written at least every auditFlush; a line that
// cannot be written is counted, never waited for.
const (
	auditSize  = 16 << 20
	auditKeep  = 4
	auditFlush = 200 * time.Millisecond
)

type auditLog struct {
	path string

	mu    sync.Mutex // protects the fields below
	file  *os.File
	buf   *bufio.Writer
	size  int64
	lost  uint64
	line  []byte
	lines uint64
}

func openAudit(stateDir string) (*auditLog, error) {
	a := &auditLog{path: filepath.Join(stateDir, "audit.jsonl")}
	return a, a.open()
}

func (a *auditLog) open() error {
	f, err := os.OpenFile(a.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open audit log %s: %w", a.path, err)
	}
	st, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("open audit log %s: %w", a.path, err)
	}
	a.file, a.size = f, st.Size()
	a.buf = bufio.NewWriterSize(f, 32<<10)
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
	if a.buf == nil {
		a.lost++
		return
	}
	if a.size+int64(len(b)) > auditSize {
		a.rotateLocked()
	}
	if _, err := a.buf.Write(b); err != nil {
		a.lost++
		a.buf.Reset(a.file) // a bufio error is for ever; a full disk is not
		return
	}
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

func (a *auditLog) rotateLocked() {
	_ = a.buf.Flush()
	_ = a.file.Close()
	for i := auditKeep - 1; i >= 1; i-- {
		from := a.path
		if i > 1 {
			from += "." + strconv.Itoa(i-1)
		}
		if err := os.Rename(from, a.path+"."+strconv.Itoa(i)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			a.lost++
		}
	}
	if err := a.open(); err != nil {
		a.file, a.buf = nil, nil
	}
}

func (a *auditLog) flush() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.buf == nil { // the disk may have room again
		if a.open() != nil {
			return
		}
	}
	if err := a.buf.Flush(); err != nil {
		a.lost++
		a.buf.Reset(a.file)
	}
}

// run flushes until ctx ends, and once more then.
func (a *auditLog) run(ctx context.Context) {
	t := time.NewTicker(auditFlush)
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
	a.flush()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.file == nil {
		return nil
	}
	err := a.file.Close()
	a.file, a.buf = nil, nil
	return err
}

func (a *auditLog) stats() (lines, lost uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lines, a.lost
}
