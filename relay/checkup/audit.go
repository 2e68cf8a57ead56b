package checkup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/go-json-experiment/json/jsontext"
)

// The audit log has no checksums: each line is a separate JSON object. A check can only find lines that
// are not JSON. The files are audit.jsonl, refusals.jsonl and their older parts with a number
// (audit.jsonl.1). A power cut can leave zeros or a part of a line at the end of the file. The next relay
// ends that line and appends after it, so damage can be in the middle of a file too.

// maxAuditLine is the longest line that is parsed, bytes; a longer one counts as damaged. The relay writes
// shorter ones, because package audit cuts each member at 256 bytes and bounds the reasons of a refusal.
const maxAuditLine = 64 << 10

// checkAudit checks that each line of the audit files is a JSON object. Damage here has no repair: the
// line is lost, and the relay works without it.
func (c *checker) checkAudit(ctx context.Context) (state, detail string) {
	files := c.list(storePatterns["audit"])
	if len(files) == 0 {
		return Absent, ""
	}
	lines := 0
	for _, name := range files {
		n, err := c.checkLines(ctx, name)
		if lines += n; err != nil {
			c.fail("audit", name, err, RepairNone)
		}
	}
	return "", fmt.Sprintf("%d lines in %d files are JSON", lines, len(files))
}

// checkLines checks the lines of a file, and returns how many it has, damaged ones included. It keeps one
// line in memory, whatever the size of the file. The error is one of reading, or that of ctx.
func (c *checker) checkLines(ctx context.Context, path string) (n int, err error) {
	info, err := os.Lstat(path)
	if err == nil && !info.Mode().IsRegular() {
		return 0, nil // checkPermissions reports it
	}
	var f *os.File
	if err == nil {
		f, err = os.Open(path)
	}
	if errors.Is(err, fs.ErrNotExist) { // a relay that runs has rotated it since it was listed
		return 0, nil
	} else if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	problem := func(line int, what string, isWarning bool) {
		c.add(Problem{Store: "audit", Path: path, Where: fmt.Sprintf("line %d", line), What: what, Warning: isWarning})
	}
	r := bufio.NewReaderSize(f, maxAuditLine)
	for {
		line, err := r.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF) && len(line) == 0:
			return n, ctx.Err()
		case errors.Is(err, io.EOF):
			// A relay that runs may be writing the line, and a power cut may have torn it.
			if line[0] == '{' && isText(line) {
				problem(n+1, "the last line is incomplete", true)
			} else {
				problem(n+1, "the end of the file is damaged; the other lines are sound", false)
			}
			return n, ctx.Err()
		case errors.Is(err, bufio.ErrBufferFull):
			// Skip the rest of the line. The next read meets any other error again.
			for errors.Is(err, bufio.ErrBufferFull) {
				_, err = r.ReadSlice('\n')
			}
			line = nil // too long
		case err != nil:
			return n, err
		}
		if n++; n%1000 == 0 && ctx.Err() != nil {
			return n, ctx.Err()
		}
		if v := jsontext.Value(bytes.TrimSuffix(line, []byte("\n"))); len(v) == 0 || v[0] != '{' || !v.IsValid() {
			problem(n, "the line is not JSON: it was damaged or cut off by a power cut; the other lines are sound", false)
		}
	}
}
