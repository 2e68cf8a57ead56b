package prober

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// board unpacks a file of testdata/boards and returns its section "want".
func board(t testing.TB, name string) (root, want string) {
	t.Helper()
	text, err := os.ReadFile("testdata/boards/" + name + ".txt")
	if err != nil {
		t.Fatal(err)
	}
	root = t.TempDir() + "/"
	_, rest, _ := strings.Cut(string(text), "\n-- ")
	for _, section := range strings.Split("\n"+rest, "\n-- ") {
		head, body, _ := strings.Cut(strings.TrimPrefix(section, "\n"), "\n")
		path, ok := strings.CutSuffix(head, " --")
		if !ok {
			t.Fatalf("%s: a section begins with %q", name, head)
		}
		if body != "" {
			body += "\n"
		}
		if path == "want" {
			want = body
			continue
		}
		path, target, link := strings.Cut(path, " -> ")
		if err := os.MkdirAll(filepath.Dir(root+path), 0o700); err != nil {
			t.Fatal(err)
		}
		if link {
			err = os.Symlink(target, root+path)
		} else {
			err = os.WriteFile(root+path, []byte(body), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root, want
}

// readModules reads every module of m once.
func readModules(t testing.TB, readers []ModuleReader) ModuleReadings {
	t.Helper()
	var got ModuleReadings
	for i, r := range readers {
		if err := r.Read(&got); err != nil {
			t.Errorf("module %s: %v", OptionalModuleNames()[i], err)
		}
	}
	return got
}

func openModules(t testing.TB, root string) []ModuleReader {
	t.Helper()
	m := newMachine(root, "/", threeSeconds).(*machineSource)
	var readers []ModuleReader
	for _, name := range OptionalModuleNames() {
		r := m.OpenModule(name)
		t.Cleanup(func() { r.Close() })
		readers = append(readers, r)
	}
	return readers
}

func TestBoards(t *testing.T) {
	for _, name := range []string{"pi3", "pi4", "pi5", "orangepi5", "orangepi-pc", "desktop", "pc-without-any"} {
		t.Run(name, func(t *testing.T) {
			root, want := board(t, name)
			var compact bytes.Buffer
			if err := json.Compact(&compact, []byte(want)); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				readers := openModules(t, root)
				if first := readModules(t, readers); first.Network != nil {
					t.Errorf("network after one reading: %+v", first.Network)
				}
				time.Sleep(time.Second)
				later, err := os.ReadFile(root + "proc/net/dev.later")
				if err != nil {
					t.Fatal(err)
				}
				write(t, root+"proc/net/dev", string(later))
				m := readModules(t, readers)
				for i := firstOptional; i < NumModules; i++ {
					if err := moduleTable[i].check(&m); err != nil {
						t.Error(err)
					}
				}
				got, err := json.Marshal(m)
				if err != nil {
					t.Fatal(err)
				}
				if string(got) != compact.String() {
					t.Errorf("got  %s\nwant %s", got, compact.String())
				}
			})
		})
	}
}

// A machine that has nothing at all: every module is absent, and only a missing
// /proc/net/dev is an error.
func TestBareMachine(t *testing.T) {
	for i, r := range openModules(t, t.TempDir()+"/") {
		var m ModuleReadings
		err := r.Read(&m)
		if m != (ModuleReadings{}) {
			t.Errorf("%s: %+v, want nothing", OptionalModuleNames()[i], m)
		}
		if wantErr := Module(i) == ModuleNetwork-firstOptional; errors.Is(err, fs.ErrNotExist) != wantErr || (err != nil) != wantErr {
			t.Errorf("%s: %v", OptionalModuleNames()[i], err)
		}
	}
}

// TestBadSensors checks that a failing sensor removes no other one, and that a figure out of
// range is not reported.
func TestBadSensors(t *testing.T) {
	root, _ := board(t, "pi5")
	readers := openModules(t, root)
	zone := root + "sys/devices/virtual/thermal/thermal_zone0/temp"
	nvme := root + "sys/class/hwmon/hwmon4/temp1_input"
	for _, text := range []string{"", "hot\n", "0\n", "-61000\n", "151000\n", "99999999999999999999\n", "61 350\n", "61.35\n"} {
		write(t, zone, text)
		m := readModules(t, readers)
		if m.Temperature == nil || m.Temperature.HottestC != 54.3 || len(m.Temperature.Zones) != 3 {
			t.Errorf("with a zone of %q: %+v, want the three other sensors", text, m.Temperature)
		}
	}
	for _, path := range []string{nvme, root + "sys/class/hwmon/hwmon4/temp2_input", root + "sys/class/hwmon/hwmon1/temp1_input"} {
		write(t, path, "x\n")
	}
	var m ModuleReadings
	if err := readers[ModuleTemperature-firstOptional].Read(&m); m.Temperature != nil || !errors.Is(err, errTemperature) || !strings.Contains(err.Error(), "try: cat ") {
		t.Errorf("no sensor works: %+v, %v", m.Temperature, err)
	}
	write(t, root+"sys/class/hwmon/hwmon3/in0_lcrit_alarm", "2\n")
	if err := readers[ModulePower-firstOptional].Read(&m); m.Power != nil || !errors.Is(err, errFlag) {
		t.Errorf("the alarm says 2: %+v, %v", m.Power, err)
	}
}

func TestThrottledThroughTheDriver(t *testing.T) {
	root, _ := board(t, "pi5")
	readers := openModules(t, root)
	path := root + "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled"
	write(t, path, "e0000\n") // not now, but within two seconds
	m := readModules(t, readers)
	want := Power{UnderVoltage: new(false), FreqCapped: new(true), Throttled: new(true), SoftTempLimit: new(true)}
	if got, _ := json.Marshal(m.Power); m.Power == nil || *m.Power.UnderVoltage != *want.UnderVoltage ||
		!*m.Power.FreqCapped || !*m.Power.Throttled || !*m.Power.SoftTempLimit {
		t.Errorf("got %s", got)
	}
	write(t, path, "not hex\n")
	m = readModules(t, readers)
	if m.Power == nil || m.Power.Throttled != nil || m.Power.UnderVoltage == nil {
		t.Errorf("with a bad get_throttled: %+v, want the alarm of hwmon alone", m.Power)
	}
}

// Sensors that come or go are noticed within five minutes; the eMMC at each reading.
func TestSensorsComeAndGo(t *testing.T) {
	root, _ := board(t, "pi4")
	synctest.Test(t, func(t *testing.T) {
		readers := openModules(t, root)
		alarm := root + "sys/class/hwmon/hwmon1/name"
		write(t, alarm, "not yet\n")
		if err := os.Remove(root + "sys/devices/platform/soc/soc:firmware/get_throttled"); err != nil {
			t.Fatal(err)
		}
		if m := readModules(t, readers); m.Power != nil || m.Wear == nil {
			t.Errorf("before: %+v", m)
		}
		write(t, alarm, "rpi_volt\n")
		if err := os.Remove(root + "sys/block/mmcblk0"); err != nil {
			t.Fatal(err)
		}
		if m := readModules(t, readers); m.Power != nil || m.Wear != nil {
			t.Errorf("at once: %+v, want no power yet, wear no more", m)
		}
		time.Sleep(rediscoverInterval)
		if m := readModules(t, readers); m.Power == nil || !*m.Power.UnderVoltage {
			t.Errorf("five minutes on: %+v", m.Power)
		}
	})
}

func TestSensorsAreBounded(t *testing.T) {
	root := t.TempDir() + "/"
	for i := range 40 {
		dir := fmt.Sprintf("%ssys/class/thermal/thermal_zone%d/", root, i)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, dir+"type", "a-very-long-name-that-does-not-end-\xff\x00-here\n")
		write(t, dir+"temp", fmt.Sprintf("%d\n", 40000+i*1000))
		block := fmt.Sprintf("%ssys/block/mmcblk%d/device/", root, i)
		if err := os.MkdirAll(block, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, block+"life_time", "0x02 0x02\n")
	}
	r := &temperatureReader{root: root}
	defer r.Close()
	var m ModuleReadings
	if err := errors.Join(r.Read(&m), wearReader{root}.Read(&m)); err != nil {
		t.Fatal(err)
	}
	if len(m.Temperature.Zones) != maxZones || m.Temperature.HottestC != 55 || len(m.Wear.Devices) != maxWearDevices {
		t.Errorf("%d zones up to %v, %d cards", len(m.Temperature.Zones), m.Temperature.HottestC, len(m.Wear.Devices))
	}
	for i := firstOptional; i < NumModules; i++ {
		if err := moduleTable[i].check(&m); err != nil {
			t.Error(err)
		}
	}
}

func TestDescriptorsAreClosed(t *testing.T) {
	count := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip(err)
		}
		return len(fds)
	}
	root, _ := board(t, "orangepi5")
	before := count()
	for range 20 {
		var m ModuleReadings
		for _, r := range []ModuleReader{newNetworkReader(root), &temperatureReader{root: root}, &powerReader{root: root}, wearReader{root}} {
			if err := errors.Join(r.Read(&m), r.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
	if after := count(); after > before+5 {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

// BenchmarkModules is the price of one reading of each module of a board; the files
// are of a disk here and not of sysfs.
func BenchmarkModules(b *testing.B) {
	root, _ := board(b, "pi4")
	for i, r := range openModules(b, root) {
		b.Run(OptionalModuleNames()[i], func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				var m ModuleReadings
				if err := r.Read(&m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkTick is the price of one sample in the loop, without and with modules.
func BenchmarkTick(b *testing.B) {
	root, _ := board(b, "pi4")
	if err := os.CopyFS(root, os.DirFS("testdata/proc/quad")); err != nil {
		b.Fatal(err)
	}
	for _, modules := range [][]string{nil, {"temperature"}, OptionalModuleNames()} {
		b.Run(fmt.Sprintf("modules=%d", len(modules)), func(b *testing.B) {
			p := New(Options{Root: root, Modules: modules})
			p.source.(*machineSource).disk.statfs = fixed
			for _, name := range modules {
				p.moduleIntervals[must(optionalModule(name))] = 0 // each time
			}
			p.nextSample()
			var s Sample
			b.ReportAllocs()
			for b.Loop() {
				at, _ := p.nextSample()
				if err := p.takeSample(&s, at); err != nil {
					b.Fatal(err)
				}
			}
			if err := errors.Join(p.modules.close(), p.source.Close()); err != nil {
				b.Error(err)
			}
		})
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestModuleOpeners: every optional module of the catalogue has a reader.
func TestModuleOpeners(t *testing.T) {
	for _, name := range OptionalModuleNames() {
		if moduleOpeners[name] == nil {
			t.Errorf("module %s has no reader", name)
		}
	}
	if len(moduleOpeners) != len(OptionalModuleNames()) {
		t.Errorf("%d readers for %d modules", len(moduleOpeners), len(OptionalModuleNames()))
	}
}
