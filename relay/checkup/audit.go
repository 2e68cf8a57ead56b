package checkup

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/go-json-experiment/json/jsontext"
)

const maxAuditLine = 64 << 10 // bytes; longer ones are counted as damaged

// checkAudit checks that each line of the audit files is a JSON object. A power cut may leave one
// torn line at the end of what was written.
func (c *checker) checkAudit(ctx context.Context) (state, detail string) {
	files := c.list("*.jsonl*")
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

func (c *checker) checkLines(ctx context.Context, path string) (n int, err error) {
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() {
		return 0, err // checkPermissions reports it
	}
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	r := bufio.NewReaderSize(f, maxAuditLine)
	for {
		line, err := r.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF):
			if len(line) > 0 && line[0] == '{' && isText(line) { // a live relay may be writing it
				c.add(Problem{Store: "audit", Path: path, Where: fmt.Sprintf("line %d", n+1), What: "the last line is incomplete", Warning: true})
			} else if len(line) > 0 {
				c.add(Problem{Store: "audit", Path: path, Where: fmt.Sprintf("line %d", n+1), What: "the end of the file is damaged; the other lines are sound"})
			}
			return n, ctx.Err()
		case errors.Is(err, bufio.ErrBufferFull):
			for errors.Is(err, bufio.ErrBufferFull) {
				_, err = r.ReadSlice('\n')
			}
			line = nil
		case err != nil:
			return n, err
		}
		if n++; n%1000 == 0 && ctx.Err() != nil {
			return n, ctx.Err()
		}
		if v := jsontext.Value(bytes.TrimSuffix(line, []byte("\n"))); len(v) == 0 || v[0] != '{' || !v.IsValid() {
			c.add(Problem{Store: "audit", Path: path, Where: fmt.Sprintf("line %d", n), What: "the line is not JSON: it was damaged or cut off by a power cut; the other lines are sound"})
		}
	}
}
