package term

import (
	"fmt"
	"strings"
	"time"
)

// Ago returns how long ago a moment was, in one unit, which is precise enough to compare
// ages. ms is in milliseconds since 1970; 0 is "never". A moment in the future is "now": the clock of the
// machine that gave it is ahead of this one's.
func Ago(ms int64) string {
	if ms == 0 {
		return "never"
	}
	d := time.Since(time.UnixMilli(ms))
	switch {
	case d < 2*time.Second:
		return "now"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%d min ago", int(d.Minutes()))
	case d < 2*day:
		return fmt.Sprintf("%d h ago", int(d.Hours()))
	}
	return fmt.Sprintf("%d days ago", int(d.Hours()/24))
}

// Bytes returns a size in binary units: 512.3 MiB.
func Bytes(n uint64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/unit, 0
	for ; v >= unit && i < 4; i++ {
		v /= unit
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[i])
}

// Span returns a duration without trailing zero units: 1m0s is 1m. It is for reading; package
// duration writes what flags and settings take.
func Span(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = s[:len(s)-2]
	}
	if strings.HasSuffix(s, "h0m") {
		s = s[:len(s)-2]
	}
	return s
}

// Value returns a number with its unit, in at most nine characters. The units are %, C, MiB
// and B/s; any other is printed without one.
func Value(v float64, unit string) string {
	switch unit {
	case "%", "C":
		return fmt.Sprintf("%.1f %s", v, unit)
	case "MiB":
		if v >= 10240 {
			return fmt.Sprintf("%.1f GiB", v/1024)
		}
		return fmt.Sprintf("%.0f MiB", v)
	case "B/s":
		if v < 999.5 {
			return fmt.Sprintf("%.0f B/s", v)
		}
		for _, prefix := range "kM" {
			if v /= 1000; v < 999.5 {
				return fmt.Sprintf("%.1f %cB/s", v, prefix)
			}
		}
		return fmt.Sprintf("%.1f GB/s", v/1000)
	}
	return fmt.Sprintf("%.2f", v)
}
