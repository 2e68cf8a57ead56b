package prober

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestParseNetDev(t *testing.T) {
	const head = "Inter-|   Receive  |  Transmit\n face |bytes packets\n"
	const line = "  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
	tests := []struct {
		name, in, want string
		err            error
	}{
		{"usual", head + line, "eth0 [1 2 3 9 10 11];", nil},
		{"no blank after the colon", head + "eth0:1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n", "eth0 [1 2 3 9 10 11];", nil},
		{"largest", head + "a: 18446744073709551615 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0\n", "a [18446744073709551615 0 0 0 0 0];", nil},
		{"no interfaces", head, "", nil},
		{"the last line is cut off", head + line + "  eth1: 1 2 3 4", "eth0 [1 2 3 9 10 11];", nil},
		{"cut off in the last number", head + strings.TrimSuffix(line, "\n"), "", nil},
		{"empty", "", "", errEmpty},
		{"no header", line + line + line, "", errNetHeader},
		{"header cut off", "Inter-|   Receive\n face |", "", errNetHeader},
		{"fifteen counters", head + "eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15\n", "", errNetLine},
		{"negative", head + "eth0: 1 -2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n", "", errNetLine},
		{"above 2^64", head + "eth0: 18446744073709551616 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n", "", errNetLine},
		{"no colon", head + "eth0 1 2\n", "", errNetLine},
		{"a path for a name", head + "../../etc: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n", "", errNetLine},
		{"dots for a name", head + "..: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n", "", errNetLine},
		{"a name too long", head + "abcdefghijklmnop: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n", "", errNetLine},
		{"no name", head + ": 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n", "", errNetLine},
	}
	for _, tt := range tests {
		got := ""
		err := parseNetDev([]byte(tt.in), func(name []byte, c netCounters) { got += fmt.Sprintf("%s %v;", name, c) })
		if got != tt.want || err != tt.err {
			t.Errorf("%s: got %q, %v, want %q, %v", tt.name, got, err, tt.want, tt.err)
		}
	}
}

func TestParseTemp(t *testing.T) {
	tests := []struct {
		in   string
		zone bool
		want float64
		err  error
	}{
		{"48312\n", true, 48.3, nil},
		{"48350", false, 48.4, nil},
		{"-5432\n", false, -5.4, nil},
		{"150000\n", false, 150, nil},
		{"-60000\n", true, -60, nil},
		{"1\n", false, 0, nil},
		{"52\n", true, 52, nil},
		{"52\n", false, 0.1, nil},
		{"150\n", true, 150, nil},
		{"151\n", true, 0.2, nil},
		{"0\n", true, 0, errTemperature},
		{"-0\n", true, 0, errTemperature},
		{"150001\n", false, 0, errTemperature},
		{"-60001\n", false, 0, errTemperature},
		{"-61\n", true, 0, errTemperature},
		{"", false, 0, errTemperature},
		{"\n", false, 0, errTemperature},
		{"48312 \n", false, 0, errTemperature},
		{"+48312\n", false, 0, errTemperature},
		{"--48312\n", false, 0, errTemperature},
		{"4e4\n", false, 0, errTemperature},
		{"NaN\n", false, 0, errTemperature},
		{"48.3\n", false, 0, errTemperature},
		{"18446744073709551616\n", false, 0, errTemperature},
	}
	for _, tt := range tests {
		if got, err := parseTemp([]byte(tt.in), tt.zone); got != tt.want || err != tt.err {
			t.Errorf("%q (zone %v): got %v, %v, want %v, %v", tt.in, tt.zone, got, err, tt.want, tt.err)
		}
	}
}

func TestParseHex(t *testing.T) {
	tests := []struct {
		in, rest string
		want     uint32
		err      error
	}{
		{"50005\n", "", 0x50005, nil},
		{"0x50005\n", "", 0x50005, nil},
		{"0XfF 0x01\n", "0x01\n", 0xff, nil},
		{"0", "", 0, nil},
		{"00000000000ffffffff", "", 0xffffffff, nil},
		{"100000000", "", 0, errHex},
		{"", "", 0, errHex},
		{"\n", "", 0, errHex},
		{"0x", "", 0, errHex},
		{"0x\n", "", 0, errHex},
		{"5g\n", "", 0, errHex},
		{"-5\n", "", 0, errHex},
		{"@\n", "", 0, errHex},
		{"`\n", "", 0, errHex},
		{":\n", "", 0, errHex},
		{"/\n", "", 0, errHex},
	}
	for _, tt := range tests {
		got, rest, err := parseHex([]byte(tt.in))
		if got != tt.want || string(rest) != tt.rest || err != tt.err {
			t.Errorf("%q: got %x, %q, %v, want %x, %q, %v", tt.in, got, rest, err, tt.want, tt.rest, tt.err)
		}
	}
}

func TestParseWear(t *testing.T) {
	life := []struct {
		in    string
		pct   float64
		known bool
		err   error
	}{
		{"0x01 0x01\n", 0, true, nil},
		{"0x03 0x01\n", 20, true, nil},
		{"0x01 0x0a\n", 90, true, nil},
		{"0x0B 0x01\n", 100, true, nil},
		{"0x00 0x02\n", 10, true, nil},
		{"0x00 0x00\n", 0, false, nil},
		{"0x0c 0x00\n", 0, false, errHex},
		{"0x01\n", 0, false, errHex},
		{"0x01 0x01 0x01\n", 0, false, errHex},
		{"", 0, false, errHex},
	}
	for _, tt := range life {
		if pct, known, err := parseLifeTime([]byte(tt.in)); pct != tt.pct || known != tt.known || err != tt.err {
			t.Errorf("%q: got %v, %v, %v, want %v, %v, %v", tt.in, pct, known, err, tt.pct, tt.known, tt.err)
		}
	}
	for in, want := range map[string]string{"0x01\n": EOLNormal, "02\n": EOLWarning, "0x03": EOLUrgent, "0x00\n": ""} {
		if got, err := parsePreEOL([]byte(in)); got != want || err != nil {
			t.Errorf("%q: got %q, %v, want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "0x04\n", "normal\n", "0x01 0x01\n"} {
		if got, err := parsePreEOL([]byte(in)); err != errHex {
			t.Errorf("%q: got %q, %v", in, got, err)
		}
	}
}

func TestParseThrottled(t *testing.T) {
	flags := func(p Power) string {
		s := ""
		for _, f := range []*bool{p.UnderVoltage, p.FreqCapped, p.Throttled, p.SoftTempLimit} {
			s += map[bool]string{true: "1", false: "0"}[*f]
		}
		return s
	}
	for in, want := range map[string]string{
		"0\n": "0000", "50005\n": "1010", "0x1": "1000", "2": "0100", "4": "0010", "8": "0001",
		"10000": "1000", "20000": "0100", "40000": "0010", "80000": "0001", "f": "1111", "fff0fff0": "0000",
	} {
		if p, err := parseThrottled([]byte(in)); err != nil || flags(p) != want {
			t.Errorf("%q: got %v, %v, want %s", in, p, err, want)
		}
	}
	for _, in := range []string{"", "throttled=0x0\n", "0 0\n"} {
		if p, err := parseThrottled([]byte(in)); err != errHex || p != (Power{}) {
			t.Errorf("%q: got %v, %v", in, p, err)
		}
	}
}

// What leaves is in range, whatever a source says.
func TestModulesCheck(t *testing.T) {
	net := func(f func(*Network)) ModuleReadings {
		n := Network{WindowMS: 1}
		f(&n)
		return ModuleReadings{Network: &n}
	}
	temp := func(hot float64, z ...Zone) ModuleReadings { return ModuleReadings{Temperature: &Temperature{hot, z}} }
	worn := func(w Wear) ModuleReadings { return ModuleReadings{Wear: &w} }
	card := func(pct float64) WearDevice { return WearDevice{"mmcblk0", &pct, ""} }
	nan, inf := math.NaN(), math.Inf(1)
	tests := []struct {
		name string
		m    Module
		in   ModuleReadings
		ok   bool
	}{
		{"network", ModuleNetwork, net(func(*Network) {}), true},
		{"absent", ModuleNetwork, ModuleReadings{}, true},
		{"no window", ModuleNetwork, net(func(n *Network) { n.WindowMS = 0 }), false},
		{"negative window", ModuleNetwork, net(func(n *Network) { n.WindowMS = -1 }), false},
		{"rate NaN", ModuleNetwork, net(func(n *Network) { n.PacketsOutPerS = nan }), false},
		{"rate Inf", ModuleNetwork, net(func(n *Network) { n.BytesInPerS = inf }), false},
		{"rate negative", ModuleNetwork, net(func(n *Network) { n.BytesOutPerS = -1 }), false},
		{"count above 2^53", ModuleNetwork, net(func(n *Network) { n.ErrorsOut = 1<<53 + 1 }), false},
		{"temperature", ModuleTemperature, temp(20, Zone{"a", 20}, Zone{"b", -1}), true},
		{"temperature NaN", ModuleTemperature, temp(nan, Zone{"a", nan}), false},
		{"one of them NaN", ModuleTemperature, temp(20, Zone{"a", 20}, Zone{"b", nan}), false},
		{"too hot to be true", ModuleTemperature, temp(150.1, Zone{"a", 150.1}), false},
		{"too cold", ModuleTemperature, temp(-60.1, Zone{"a", -60.1}), false},
		{"no zones", ModuleTemperature, temp(20), false},
		{"17 zones", ModuleTemperature, temp(0, make([]Zone, 17)...), false},
		{"no name", ModuleTemperature, temp(20, Zone{"", 20}), false},
		{"a name that is not printable", ModuleTemperature, temp(20, Zone{"a\n", 20}), false},
		{"a long name", ModuleTemperature, temp(20, Zone{strings.Repeat("a", 33), 20}), false},
		{"not the hottest", ModuleTemperature, temp(19, Zone{"a", 20}), false},
		{"power", ModulePower, ModuleReadings{Power: &Power{Throttled: new(false)}}, true},
		{"power without anything", ModulePower, ModuleReadings{Power: &Power{}}, false},
		{"wear", ModuleWear, worn(Wear{new(10.0), "", []WearDevice{card(10)}}), true},
		{"wear without cards", ModuleWear, worn(Wear{new(10.0), "", nil}), false},
		{"wear NaN", ModuleWear, worn(Wear{new(10.0), "", []WearDevice{card(nan)}}), false},
		{"wear above 100", ModuleWear, worn(Wear{new(101.0), "", []WearDevice{card(10)}}), false},
		{"wear negative", ModuleWear, worn(Wear{new(10.0), "", []WearDevice{card(-1)}}), false},
		{"another state", ModuleWear, worn(Wear{new(10.0), "fine", []WearDevice{card(10)}}), false},
		{"a card that says nothing", ModuleWear, worn(Wear{new(10.0), "", []WearDevice{{"mmcblk0", nil, ""}}}), false},
		{"nine cards", ModuleWear, worn(Wear{new(10.0), "", []WearDevice{card(1), card(1), card(1), card(1), card(1), card(1), card(1), card(1), card(1)}}), false},
	}
	for _, tt := range tests {
		if err := moduleTable[tt.m].check(&tt.in); (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func FuzzNetDev(f *testing.F) {
	f.Add([]byte("Inter-|   Receive  |  Transmit\n face |bytes packets\n  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"))
	f.Add([]byte("Inter-|\n face |\nlo: 18446744073709551615 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17\nx:"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var back bytes.Buffer
		back.WriteString("Inter-|\n face |\n")
		n := 0
		err := parseNetDev(b, func(name []byte, c netCounters) {
			if len(name) == 0 || len(name) > maxIfName || bytes.ContainsAny(name, "/ \t") {
				t.Fatalf("a name %q", name)
			}
			n++
			fmt.Fprintf(&back, "%s: %d %d %d 0 0 0 0 0 %d %d %d 0 0 0 0 0\n", name,
				c[bytesIn], c[packetsIn], c[errorsIn], c[bytesOut], c[packetsOut], c[errorsOut])
		})
		if err != nil {
			return
		}
		// What was printed reads back the same.
		var again bytes.Buffer
		again.WriteString("Inter-|\n face |\n")
		if err := parseNetDev(back.Bytes(), func(name []byte, c netCounters) {
			n--
			fmt.Fprintf(&again, "%s: %d %d %d 0 0 0 0 0 %d %d %d 0 0 0 0 0\n", name,
				c[bytesIn], c[packetsIn], c[errorsIn], c[bytesOut], c[packetsOut], c[errorsOut])
		}); err != nil || n != 0 || again.String() != back.String() {
			t.Fatalf("%q reads back as %q, %v", back.String(), again.String(), err)
		}
	})
}

func FuzzSensors(f *testing.F) {
	for _, s := range []string{"48312\n", "-5432\n", "0x50005\n", "0x03 0x01\n", "02\n", "1\n", "", "ffffffffff", "999999999999999999999"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, zone := range []bool{false, true} {
			if c, err := parseTemp(b, zone); err == nil && !(c >= minC && c <= maxC) || err != nil && c != 0 {
				t.Errorf("%q: %v, %v", b, c, err)
			}
		}
		v, rest, err := parseHex(b)
		if err == nil {
			text := fmt.Sprintf("%#x ", v) + string(rest)
			if again, tail, err := parseHex([]byte(text)); err != nil || again != v || !bytes.Equal(tail, rest) {
				t.Errorf("%q: %x, then %q: %x, %q, %v", b, v, text, again, tail, err)
			}
		}
		if pct, known, err := parseLifeTime(b); !(pct >= 0 && pct <= 100) || err != nil && known {
			t.Errorf("%q: %v, %v, %v", b, pct, known, err)
		}
		if s, err := parsePreEOL(b); err != nil && s != "" {
			t.Errorf("%q: %q, %v", b, s, err)
		}
		if p, err := parseThrottled(b); (err == nil) != (p != Power{}) {
			t.Errorf("%q: %v, %v", b, p, err)
		}
		if on, err := parseFlag(b); err != nil && on {
			t.Errorf("%q: %v, %v", b, on, err)
		}
	})
}

// TestNetworkPerWatcher checks that each watcher gets the traffic of its interval, whatever
// other watchers there are.
func TestNetworkPerWatcher(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := newFakeModules()
		row := new(int)
		last := netTotals{}
		src.read["network"] = func(n int, m *ModuleReadings) error {
			// Second i, from 0 on, brings i bytes.
			i := uint64(time.Since(src.begin) / time.Second)
			to := netTotals{time.Now(), row, netCounters{bytesIn: i * (i - 1) / 2}}
			if n > 1 {
				m.Network = newNetwork(last, to)
			}
			last = to
			return nil
		}
		p, stop := start(t, Options{Source: src, Interval: 500 * time.Millisecond, Modules: []string{"network"}})
		ctx, cancel := context.WithCancel(t.Context())
		collect := func(every time.Duration) (bytes, ms *[]uint64) {
			bytes, ms = new([]uint64), new([]uint64)
			go p.Watch(ctx, every, func(s Sample) error {
				if s.Modules != nil {
					*bytes = append(*bytes, s.Modules.Network.BytesIn)
					*ms = append(*ms, uint64(s.Modules.Network.WindowMS))
				}
				return nil
			})
			return bytes, ms
		}
		settle(time.Second)
		fast, fastMS := collect(time.Second)
		slow, slowMS := collect(4 * time.Second)
		settle(12*time.Second + time.Millisecond)
		cancel()
		synctest.Wait()
		// The first of each covers what the sampler had last, half a second.
		if want := []uint64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}; !slices.Equal(*fast, want) {
			t.Errorf("each second: %v, want %v", *fast, want)
		}
		if want := []uint64{500, 1000, 1000}; !slices.Equal((*fastMS)[:3], want) {
			t.Errorf("windows %v, want %v", *fastMS, want)
		}
		if want := []uint64{0, 1 + 2 + 3 + 4, 5 + 6 + 7 + 8, 9 + 10 + 11 + 12}; !slices.Equal(*slow, want) {
			t.Errorf("each four seconds: %v, want %v", *slow, want)
		}
		if want := []uint64{500, 4000, 4000, 4000}; !slices.Equal(*slowMS, want) {
			t.Errorf("windows %v, want %v", *slowMS, want)
		}
		stop()
	})
}
