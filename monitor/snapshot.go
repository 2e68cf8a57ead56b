package monitor

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"agentctl/control"
	"agentctl/term"
)

// WriteSnapshot prints a snapshot for people, one line for each module that it has.
//
// A module that the machine lacks has no line. A time of 0 means that the daemon does not
// know the time yet.
func WriteSnapshot(w io.Writer, s *control.Snapshot) error {
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%-7s %s\n", name, fmt.Sprintf(format, args...))
	}
	at := "the clock is not set yet"
	if s.TS > 0 {
		at = time.UnixMilli(s.TS).Format(time.DateTime)
	}
	row("Time", "%s", at)
	if s.CPU != nil {
		row("CPU", "%.1f %%", s.CPU.UsagePercent)
	}
	if s.Memory != nil {
		row("Memory", "%d of %d MiB", s.Memory.Used, s.Memory.Total)
	}
	if s.Disk != nil {
		row("Disk", "%.1f %% used", s.Disk.UsagePercent)
	}
	if l := s.Load; l != nil {
		row("Load", "%.2f %.2f %.2f", l.Load1, l.Load5, l.Load15)
	}
	if n := s.Network; n != nil {
		row("Network", "%s in, %s out", term.Value(n.BytesInPerS, "B/s"), term.Value(n.BytesOutPerS, "B/s"))
	}
	if s.Temperature != nil {
		row("Temp", "%.1f C", s.Temperature.HottestC)
	}
	if r, err := snapshotReading(s); err == nil {
		if text, _ := PowerText(r.Values); text != "" {
			row("Power", "%s", text)
		}
	}
	if s.Wear != nil && s.Wear.UsedPct != nil {
		row("Wear", "%.0f %% of the card's life used", *s.Wear.UsedPct)
	}
	return nil
}

// snapshotReading is a snapshot as the views have it. It goes through JSON, which is what
// ParseReading reads from the socket.
func snapshotReading(s *control.Snapshot) (r control.HistoryItem, err error) {
	b, err := json.Marshal(s)
	if err != nil {
		return r, err
	}
	return ParseReading(b)
}
