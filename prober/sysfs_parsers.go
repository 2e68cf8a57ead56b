package prober

import (
	"bytes"
	"errors"
)

// The parsers of modules take one file of /proc or sysfs each. Like those in
// proc_parsers.go they refuse what is cut off or out of range, and do not allocate.

var (
	errNetHeader   = errors.New("it does not begin with the two lines of /proc/net/dev")
	errNetLine     = errors.New("a line is not a name and 16 counters")
	errTemperature = errors.New("no temperature in a range a board can have")
	errFlag        = errors.New("neither 0 nor 1")
	errHex         = errors.New("no hexadecimal number in range")
)

// maxIfName is the longest name of an interface, as the kernel has it.
const maxIfName = 15

// parseNetDev calls each with every complete line of /proc/net/dev, of which the last
// may be cut off:
//
//	name: bytes packets errs drop fifo frame compressed multicast  (received, then
//	      bytes packets errs drop fifo colls carrier compressed     transmitted)
//
// The name is valid only during the call.
func parseNetDev(b []byte, each func(name []byte, c netCounters)) error {
	if len(b) == 0 {
		return errEmpty
	}
	head, b, _ := bytes.Cut(b, []byte{'\n'})
	head2, b, ok := bytes.Cut(b, []byte{'\n'})
	if !ok || !bytes.HasPrefix(head, []byte("Inter-|")) || !bytes.HasPrefix(head2, []byte(" face |")) {
		return errNetHeader
	}
	for {
		line, rest, whole := bytes.Cut(b, []byte{'\n'})
		if !whole {
			return nil
		}
		b = rest
		name, counters, ok := bytes.Cut(bytes.TrimLeft(line, " "), []byte{':'})
		if !ok || !isIfName(name) {
			return errNetLine
		}
		c, ok := parseNetCounters(counters)
		if !ok {
			return errNetLine
		}
		each(name, c)
	}
}

// isIfName reports whether the kernel allows the name for an interface.
func isIfName(name []byte) bool {
	return len(name) > 0 && len(name) <= maxIfName && name[0] != '.' && !bytes.ContainsAny(name, "/ \t\x00")
}

// parseNetCounters reads the counters after the colon. They have 64 bits; the differences
// that are reported are checked against 53 bits, which JSON readers have.
func parseNetCounters(b []byte) (c netCounters, ok bool) {
	var v [16]uint64
	for i := range v {
		n, rest, ok := parseUint(bytes.TrimLeft(b, " "))
		if !ok || len(rest) > 0 && rest[0] != ' ' {
			return netCounters{}, false
		}
		v[i], b = n, rest
	}
	return netCounters{v[0], v[1], v[2], v[8], v[9], v[10]}, true
}

// parseTemp reads a temperature in thousandths of a degree, as temp1_input of hwmon
// and temp of a thermal zone give it; in zone, what is up to 150 is in whole degrees,
// as the 3.x kernels of some boards have it. Zero is refused: drivers report it when they
// have not measured yet or the sensor is off, and a real temperature is hardly ever 0.000.
func parseTemp(b []byte, zone bool) (float64, error) {
	b = bytes.TrimRight(b, "\n")
	digits, negative := bytes.CutPrefix(b, []byte{'-'})
	v, rest, ok := parseUint(digits)
	if !ok || len(rest) > 0 || v == 0 || v > maxC*1000 || negative && v > -minC*1000 {
		return 0, errTemperature
	}
	c := float64((v+50)/100) / 10
	if zone && v <= maxC {
		c = float64(v)
	}
	if negative {
		c = -c
	}
	if c < minC {
		return 0, errTemperature
	}
	return c, nil
}

// parseFlag reads 0 or 1, as an alarm of hwmon has it.
func parseFlag(b []byte) (bool, error) {
	switch string(bytes.TrimRight(b, "\n")) {
	case "0":
		return false, nil
	case "1":
		return true, nil
	}
	return false, errFlag
}

// parseHex reads a hexadecimal number of at most 32 bits, with or without 0x, and
// returns what follows the blanks after it.
func parseHex(b []byte) (v uint32, rest []byte, err error) {
	if len(b) > 2 && b[0] == '0' && (b[1] == 'x' || b[1] == 'X') {
		b = b[2:]
	}
	n := 0
	for ; n < len(b); n++ {
		d, letter := b[n]-'0', b[n]|0x20-'a'
		if letter < 6 {
			d = letter + 10
		} else if d > 9 {
			break
		}
		if v >= 1<<28 {
			return 0, nil, errHex
		}
		v = v<<4 | uint32(d)
	}
	if n == 0 || n < len(b) && b[n] != ' ' && b[n] != '\n' {
		return 0, nil, errHex
	}
	return v, bytes.TrimLeft(b[n:], " \n"), nil
}

// The bits of get_throttled; those of what was lately are 16 higher.
const (
	bitUnderVoltage = 1 << iota
	bitFreqCapped
	bitThrottled
	bitSoftTempLimit
)

// parseThrottled reads get_throttled of the Raspberry Pi firmware. Lately means since
// the driver sampled last, about 2 s ago, when it had those bits cleared.
func parseThrottled(b []byte) (Power, error) {
	v, rest, err := parseHex(b)
	if err != nil || len(rest) > 0 {
		return Power{}, errHex
	}
	v |= v >> 16
	return Power{
		UnderVoltage:  new(v&bitUnderVoltage != 0),
		FreqCapped:    new(v&bitFreqCapped != 0),
		Throttled:     new(v&bitThrottled != 0),
		SoftTempLimit: new(v&bitSoftTempLimit != 0),
	}, nil
}

// parseLifeTime reads life_time of an eMMC: the estimates for its two kinds of cells,
// each in tenths of its life from 1 (less than a tenth is used) to 10, 11 when it is
// exceeded, 0 when unknown. It returns the larger one's lower end in percent.
func parseLifeTime(b []byte) (pct float64, known bool, err error) {
	a, rest, err := parseHex(b)
	if err != nil {
		return 0, false, err
	}
	t, rest, err := parseHex(rest)
	if err != nil || len(rest) > 0 || a > 11 || t > 11 {
		return 0, false, errHex
	}
	if a = max(a, t); a == 0 {
		return 0, false, nil
	}
	return float64(a-1) * 10, true, nil
}

// parsePreEOL reads pre_eol_info of an eMMC; "" is unknown.
func parsePreEOL(b []byte) (string, error) {
	v, rest, err := parseHex(b)
	if err != nil || len(rest) > 0 || v > 3 {
		return "", errHex
	}
	return [...]string{"", EOLNormal, EOLWarning, EOLUrgent}[v], nil
}
