package main

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
)

// export writes the records of the window as they come.
func (h *historyQuery) export(ctx context.Context, w io.Writer, format string) error {
	b := bufio.NewWriterSize(w, 64<<10)
	enc := json.NewEncoder(b)
	var err error
	switch format {
	case "csv":
		err = h.exportCSV(ctx, b)
	case "ndjson":
		err = h.each(ctx, h.modules, h.step, func(item control.HistoryItem) error { return enc.Encode(item) })
	case "json":
		err = h.exportJSON(ctx, b)
	case "yaml":
		err = h.exportYAML(ctx, b)
	}
	if ferr := b.Flush(); err == nil && ferr != nil {
		return exit(exitFailure, "write: %w", ferr)
	}
	return err
}

// exportJSON writes {"from_ts", "to_ts", "step_ms", "items"}, an item a line.
func (h *historyQuery) exportJSON(ctx context.Context, w io.Writer) error {
	fmt.Fprintf(w, "{\n  \"from_ts\": %d,\n  \"to_ts\": %d,\n  \"step_ms\": %d,\n  \"items\": [", h.from, h.to, h.step)
	sep := "\n    "
	err := h.each(ctx, h.modules, h.step, func(item control.HistoryItem) error {
		raw, err := json.Marshal(item)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "%s%s", sep, raw)
		sep = ",\n    "
		return err
	})
	if err != nil {
		return err
	}
	_, err = io.WriteString(w, "\n  ]\n}\n")
	return err
}

func (h *historyQuery) exportYAML(ctx context.Context, w io.Writer) error {
	fmt.Fprintf(w, "from_ts: %d\nto_ts: %d\nstep_ms: %d\n", h.from, h.to, h.step)
	none := true
	err := h.each(ctx, h.modules, h.step, func(item control.HistoryItem) error {
		if none {
			fmt.Fprintln(w, "items:")
			none = false
		}
		return writeYAML(w, []control.HistoryItem{item})
	})
	if err == nil && none {
		_, err = fmt.Fprintln(w, "items: []")
	}
	return err
}

// historyProbe is how many records are looked at to learn the columns of an export.
const historyProbe = 200

// exportCSV writes a column for each number there is in the window, by its dotted name. A
// first, coarse look tells which these are, so that the rest need not be held in memory;
// what that look missed is told on the way.
func (h *historyQuery) exportCSV(ctx context.Context, w io.Writer) error {
	seen := map[string]bool{}
	if !h.all {
		for _, m := range h.modules {
			for _, k := range moduleKeys[m] {
				seen[k] = true
			}
		}
	}
	coarse := max((h.to-h.from)/historyProbe, h.step, 1)
	err := h.each(ctx, h.modules, coarse, func(item control.HistoryItem) error {
		for k := range item.Values {
			seen[k] = true
		}
		return nil
	})
	if err != nil {
		return err
	}
	columns := make([]string, 0, len(seen))
	for k := range seen {
		columns = append(columns, k)
	}
	slices.SortFunc(columns, compareKeys)
	out := csv.NewWriter(w)
	record := append([]string{"ts"}, columns...)
	if err := out.Write(record); err != nil {
		return err
	}
	missed := ""
	err = h.each(ctx, h.modules, h.step, func(item control.HistoryItem) error {
		record[0] = strconv.FormatInt(item.TS, 10)
		found := 0
		for i, k := range columns {
			record[i+1] = ""
			if v, ok := item.Values[k]; ok {
				record[i+1] = strconv.FormatFloat(v, 'f', -1, 64)
				found++
			}
		}
		if found < len(item.Values) && missed == "" {
			for k := range item.Values {
				if !seen[k] {
					missed = k
				}
			}
		}
		return out.Write(record)
	})
	out.Flush()
	if err == nil && missed != "" {
		return exit(exitFailure, "the records have %s only now and then, so it has no column here; ask for its module: --modules %s", missed, module(missed))
	}
	if err == nil {
		err = out.Error()
	}
	return err
}
