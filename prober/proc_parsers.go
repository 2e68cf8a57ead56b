package prober

import (
	"bytes"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
)

// The parsers of /proc/stat, meminfo and loadavg take what one read of the file returned.
// A number that is cut off, negative, too long or missing is an error, because a wrong
// value looks like a healthy one. They do not allocate.

var (
	errEmpty    = errors.New("it is empty")
	errNoCPU    = errors.New(`no complete "cpu" line with at least 7 counters`)
	errNumber   = errors.New("a counter is not a number in range")
	errCPUZero  = errors.New("all CPU counters are zero")
	errNoTotal  = errors.New("no MemTotal above zero")
	errNoFree   = errors.New("neither MemAvailable nor MemFree")
	errMemRange = errors.New("memory sizes contradict each other")
	errNoLoad   = errors.New("fewer than three load figures")
)

// maxTicks bounds one CPU counter; ten of them still add up without overflow.
// At 100 Hz and 1,024 CPUs it is 2,700 years.
const maxTicks = 1 << 53

// parseStat reads the first line of /proc/stat:
//
//	cpu  user nice system idle iowait irq softirq [steal [guest guest_nice]]
//
// Waiting for I/O counts as idle. guest and guest_nice are part of user and nice.
func parseStat(b []byte) (cpuTimes, error) {
	if len(b) == 0 {
		return cpuTimes{}, errEmpty
	}
	line, _, whole := bytes.Cut(b, []byte{'\n'})
	line, isCPU := bytes.CutPrefix(line, []byte("cpu "))
	if !whole || !isCPU {
		return cpuTimes{}, errNoCPU
	}
	var t cpuTimes
	fields := 0
	for ; fields < 8; fields++ {
		line = bytes.TrimLeft(line, " ")
		if len(line) == 0 {
			break
		}
		v, rest, ok := parseUint(line)
		if !ok || v > maxTicks || len(rest) > 0 && rest[0] != ' ' {
			return cpuTimes{}, errNumber
		}
		if fields == 3 || fields == 4 {
			t.idle += v
		} else {
			t.busy += v
		}
		line = rest
	}
	if fields < 7 {
		return cpuTimes{}, errNoCPU
	}
	if t.total() == 0 {
		// Some sandboxes serve a /proc/stat of zeros, which does not mean an idle CPU.
		return cpuTimes{}, errCPUZero
	}
	return t, nil
}

// memField is a line of /proc/meminfo that is needed.
type memField uint8

const (
	memTotal memField = iota
	memFree
	memAvailable
	memCached
	memSReclaimable
	memActiveFile
	memInactiveFile
	numMemFields
)

var memNames = [numMemFields]string{"MemTotal", "MemFree", "MemAvailable", "Cached", "SReclaimable", "Active(file)", "Inactive(file)"}

// meminfo holds the needed lines of /proc/meminfo, in bytes. seen has a bit for each that
// was there.
type meminfo struct {
	value [numMemFields]uint64
	seen  uint8
}

func (m *meminfo) has(f memField) bool { return m.seen&(1<<f) != 0 }

// parseMeminfo reads /proc/meminfo and stops at MemAvailable, the third line of every
// kernel since 3.14.
func parseMeminfo(b []byte) (meminfo, error) {
	var m meminfo
	if len(b) == 0 {
		return m, errEmpty
	}
	for len(b) > 0 && !(m.has(memTotal) && m.has(memFree) && m.has(memAvailable)) {
		line, rest, whole := bytes.Cut(b, []byte{'\n'})
		if !whole {
			break // cut off: its number may be too
		}
		b = rest
		key, value, ok := bytes.Cut(line, []byte{':'})
		f := slices.Index(memNames[:], string(key))
		if !ok || f < 0 {
			continue
		}
		kb, tail, ok := parseUint(bytes.TrimLeft(value, " \t"))
		if !ok || kb > maxBytes/1024 || string(bytes.TrimLeft(tail, " ")) != "kB" {
			return meminfo{}, errNumber
		}
		m.value[f] = kb * 1024
		m.seen |= 1 << f
	}
	if m.value[memTotal] == 0 {
		return meminfo{}, errNoTotal
	}
	if !m.has(memAvailable) && !m.has(memFree) {
		return meminfo{}, errNoFree
	}
	return m, nil
}

// parseLoadavg reads the three averages at the start of /proc/loadavg.
func parseLoadavg(b []byte) ([3]float64, error) {
	var load [3]float64
	if len(b) == 0 {
		return load, errEmpty
	}
	line, _, _ := bytes.Cut(b, []byte{'\n'})
	for i := range load {
		line = bytes.TrimLeft(line, " ")
		if len(line) == 0 {
			return [3]float64{}, errNoLoad
		}
		v, rest, ok := parseDecimal(line)
		if !ok || len(rest) > 0 && rest[0] != ' ' {
			return [3]float64{}, errNumber
		}
		load[i], line = v, rest
	}
	return load, nil
}

// parseUint reads leading decimal digits; ok is false without any or above 2^64.
func parseUint(b []byte) (v uint64, rest []byte, ok bool) {
	i := 0
	for ; i < len(b) && b[i]-'0' < 10; i++ {
		d := uint64(b[i] - '0')
		if v > (1<<64-1-d)/10 {
			return 0, nil, false
		}
		v = v*10 + d
	}
	return v, b[i:], i > 0
}

// parseDecimal reads digits[.digits] with at most 15 digits in all, which a float64 holds
// exactly, so that a single division rounds correctly. A sign, an exponent, NaN and Inf
// are not accepted.
func parseDecimal(b []byte) (float64, []byte, bool) {
	whole, rest, ok := parseUint(b)
	if !ok {
		return 0, nil, false
	}
	digits := len(b) - len(rest)
	scale := uint64(1)
	if len(rest) > 0 && rest[0] == '.' {
		frac, tail, ok := parseUint(rest[1:])
		n := len(rest) - 1 - len(tail)
		digits += n
		if !ok {
			return 0, nil, false
		}
		for range n {
			scale *= 10
		}
		whole, rest = whole*scale+frac, tail
	}
	return float64(whole) / float64(scale), rest, digits <= 15
}

// printable drops everything but printable ASCII, and what is beyond 128 bytes. Names in
// /sys come from drivers and device trees, which the owner of a board can write.
func printable(s string) string {
	s = strings.TrimSpace(strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s))
	return s[:min(len(s), 128)]
}

// readLimited reads the first limit bytes of a file.
func readLimited(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, limit))
}
