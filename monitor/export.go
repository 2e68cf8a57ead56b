package monitor

import (
	"bufio"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"

	"agentctl/control"
	"agentctl/prober"
	"agentctl/term"
)

// Formats are the formats of an export:
//
//	csv     one record per line; the header names the keys, an empty cell is a value that is not new
//	ndjson  one record per line
//	json    {"from_ts", "to_ts", "step_ms", "items": [record, ...]}, one record per line
//	yaml    the same document as json
//
// Times are milliseconds since 1970.
var Formats = []string{"csv", "json", "ndjson", "yaml"}

// ColumnError reports a value so rare that the CSV export had no column for it.
type ColumnError struct {
	Key    string
	Module string // select this module to get a column for the value
}

func (e *ColumnError) Error() string {
	return fmt.Sprintf("%s occurs in so few records that it has no column", e.Key)
}

// Export writes the records of the window as they arrive, in one of Formats.
//
// Output is buffered, and flushed also after an error, so that what was read is not lost. The
// error of reading takes precedence over that of the flush. Without Modules all are exported.
func (h *Window) Export(ctx context.Context, w io.Writer, format string) error {
	b := bufio.NewWriterSize(w, 64<<10) // a write for each record would cost more than the records
	chosen := h.Modules
	if len(chosen) == 0 {
		h.Modules = ModuleNames()
	}
	var err error
	switch format {
	case "csv":
		err = h.exportCSV(ctx, b, chosen)
	case "ndjson":
		enc := json.NewEncoder(b)
		err = h.records(ctx, func(item control.HistoryItem) error { return enc.Encode(item) })
	case "json":
		err = h.exportJSON(ctx, b)
	case "yaml":
		err = h.exportYAML(ctx, b)
	default:
		err = fmt.Errorf("not a format: %q", format)
	}
	if flushErr := b.Flush(); err == nil && flushErr != nil {
		return fmt.Errorf("write: %w", flushErr)
	}
	return err
}

// exportJSON writes the document around the records by hand, so that no more than one record
// is in memory. An item is a line, for diff and for people.
//
// After an error the document is not closed: a reader must not take a part for the whole.
func (h *Window) exportJSON(ctx context.Context, w io.Writer) error {
	fmt.Fprintf(w, "{\n  \"from_ts\": %d,\n  \"to_ts\": %d,\n  \"step_ms\": %d,\n  \"items\": [", h.FromMS, h.ToMS, h.StepMS)
	separator := "\n    "
	err := h.records(ctx, func(item control.HistoryItem) error {
		raw, err := json.Marshal(item)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "%s%s", separator, raw)
		separator = ",\n    "
		return err
	})
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, "\n  ]\n}\n")
	return err
}

// exportYAML writes the same document as exportJSON. Each record is encoded as a list of
// one, which together are one list.
func (h *Window) exportYAML(ctx context.Context, w io.Writer) error {
	fmt.Fprintf(w, "from_ts: %d\nto_ts: %d\nstep_ms: %d\n", h.FromMS, h.ToMS, h.StepMS)
	header := "items:\n"
	err := h.records(ctx, func(item control.HistoryItem) error {
		_, _ = io.WriteString(w, header) // an error shows in the next write
		header = ""
		return term.WriteYAML(w, []control.HistoryItem{item})
	})
	if err == nil && header != "" {
		_, err = io.WriteString(w, "items: []\n")
	}
	return err
}

// columnProbe is how many records exportCSV reads to determine its columns. They are spread
// over the window, so that a module that ran only part of the time is found.
const columnProbe = 200

// exportCSV writes a column for each key of the window: those of the chosen modules, and
// those that a first, coarse pass finds, so that the records need not be held in memory. A
// key that only the second pass finds has no column; the export then writes all records and
// returns a *ColumnError.
func (h *Window) exportCSV(ctx context.Context, w io.Writer, chosen []string) error {
	columns, err := h.columns(ctx, chosen)
	if err != nil {
		return err
	}
	out := csv.NewWriter(w)
	record := append([]string{"ts"}, columns...)
	if err := out.Write(record); err != nil {
		return err
	}
	missed := ""
	err = h.records(ctx, func(item control.HistoryItem) error {
		record[0] = strconv.FormatInt(item.TS, 10)
		found := 0
		for i, key := range columns {
			record[i+1] = ""
			if v, ok := item.Values[key]; ok {
				record[i+1] = strconv.FormatFloat(v, 'f', -1, 64)
				found++
			}
		}
		if found < len(item.Values) && missed == "" {
			for key := range item.Values {
				if !slices.Contains(columns, key) {
					missed = key
				}
			}
		}
		return out.Write(record)
	})
	out.Flush()
	switch {
	case err != nil:
		return err
	case missed != "":
		return &ColumnError{missed, moduleOf(missed)}
	}
	return out.Error()
}

// columns returns the keys of the chosen modules, and those that a coarse pass finds, in the
// catalogue's order. A module that was asked for by name has its columns even when it has
// no values, so that scripts find them.
//
// The coarse pass has the step of the export when that is the longer one.
func (h *Window) columns(ctx context.Context, chosen []string) ([]string, error) {
	keys := map[string]bool{}
	for _, s := range prober.Sensors() {
		if s.Key != "" && slices.Contains(chosen, s.Module.Member()) {
			keys[s.Key] = true
		}
	}
	q := control.HistoryQuery{Modules: h.Modules, StepMS: max((h.ToMS-h.FromMS)/columnProbe, h.StepMS, 1)}
	err := h.each(ctx, q, func(item control.HistoryItem) error {
		for key := range item.Values {
			keys[key] = true
		}
		return nil
	})
	columns := make([]string, 0, len(keys))
	for key := range keys {
		columns = append(columns, key)
	}
	slices.SortFunc(columns, compareKeys)
	return columns, err
}
