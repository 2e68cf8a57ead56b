package prober

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// rediscoverInterval is how long the sensors that were found, or not found, are
	// trusted: drivers are loaded late, and disks come and go.
	rediscoverInterval = 5 * time.Minute
	// maxEntries bounds how many names of a sysfs directory are looked at.
	maxEntries = 256
)

// moduleOpeners make the readers of the modules; root ends in a slash.
var moduleOpeners = map[string]func(root string) ModuleReader{
	ModuleNetwork.String():     func(root string) ModuleReader { return newNetworkReader(root) },
	ModuleTemperature.String(): func(root string) ModuleReader { return &temperatureReader{root: root} },
	ModulePower.String():       func(root string) ModuleReader { return &powerReader{root: root} },
	ModuleWear.String():        func(root string) ModuleReader { return wearReader{root: root} },
}

// OpenModule returns the reader of one module of this machine.
func (m *machineSource) OpenModule(name string) ModuleReader {
	if open := moduleOpeners[name]; open != nil {
		return open(m.root)
	}
	return nil
}

// temperatureReader reads the thermal zones and hwmon sensors through files kept open.
type temperatureReader struct {
	root         string
	sensors      []*tempSensor
	discoveredAt time.Time
}

// tempSensor is a file with a temperature, and its name in Zone.
type tempSensor struct {
	procFile
	name   string
	isZone bool // of the thermal class, not of hwmon
}

// Read skips a sensor that fails now: a Wi-Fi chip that sleeps has no temperature. The
// error is that of a sensor when none has a value.
func (t *temperatureReader) Read(m *ModuleReadings) error {
	if time.Since(t.discoveredAt) >= rediscoverInterval {
		t.discover()
	}
	var got Temperature
	var failed error
	for _, s := range t.sensors {
		c, err := readProc(&s.procFile, func(b []byte) (float64, error) { return parseTemp(b, s.isZone) })
		if err != nil {
			failed = err
			continue
		}
		if got.Zones == nil {
			got.HottestC = c
			got.Zones = make([]Zone, 0, len(t.sensors))
		}
		got.HottestC = max(got.HottestC, c)
		got.Zones = append(got.Zones, Zone{s.name, c})
	}
	if got.Zones == nil {
		return failed
	}
	m.Temperature = &got
	return nil
}

// Close closes the sensors' files.
func (t *temperatureReader) Close() error {
	for _, s := range t.sensors {
		s.close()
	}
	return nil
}

// discover finds the sensors: thermal zones first, then hwmon chips that do not repeat
// them.
func (t *temperatureReader) discover() {
	t.Close()
	t.sensors, t.discoveredAt = nil, time.Now()
	for _, dir := range listEntries(t.root+"sys/class/thermal", "thermal_zone") {
		t.add(readText(dir+"/type"), dir+"/temp", true)
	}
	zones := len(t.sensors)
	for _, dir := range listEntries(t.root+"sys/class/hwmon", "hwmon") {
		chip := readText(dir + "/name")
		if chip == "" || isUnwired(chip) || t.isMirror(dir, chip, zones) {
			continue
		}
		inputs := slices.DeleteFunc(listEntries(dir, "temp"), func(p string) bool { return !strings.HasSuffix(p, "_input") })
		for _, input := range inputs {
			name := chip
			if label := readText(strings.TrimSuffix(input, "input") + "label"); label != "" {
				name += " " + label
			} else if len(inputs) > 1 {
				name += " " + strings.TrimSuffix(filepath.Base(input), "_input")
			}
			t.add(name, input, false)
		}
	}
}

// isMirror reports whether a chip of hwmon repeats one of the first zones: the thermal
// class shows each zone there as well, on older kernels without a device.
func (t *temperatureReader) isMirror(dir, chip string, zones int) bool {
	if exists(dir+"/device/temp") && exists(dir+"/device/type") {
		return true
	}
	return slices.ContainsFunc(t.sensors[:zones], func(s *tempSensor) bool {
		return strings.ReplaceAll(s.name, "-", "_") == chip
	})
}

// isUnwired reports whether chip is of a kind found on PC mainboards, some of whose inputs
// are connected to nothing and read absurdly hot.
func isUnwired(chip string) bool {
	return slices.ContainsFunc([]string{"nct", "it8", "w83", "f71"}, func(p string) bool { return strings.HasPrefix(chip, p) })
}

// add opens nothing yet. A name that is taken gets a number.
func (t *temperatureReader) add(name, path string, zone bool) {
	if name == "" || len(t.sensors) >= maxZones || !exists(path) {
		return
	}
	base := name[:min(len(name), maxZoneName-3)]
	taken := func(s *tempSensor) bool { return s.name == name }
	name = base
	for i := 2; slices.ContainsFunc(t.sensors, taken); i++ {
		name = base + " " + strconv.Itoa(i)
	}
	t.sensors = append(t.sensors, &tempSensor{newProcFile(path, 24), name, zone})
}

// powerReader reads what the kernel knows of the Raspberry Pi's supply.
type powerReader struct {
	root         string
	alarms       []*procFile // in*_lcrit_alarm of rpi_volt
	throttled    *procFile   // get_throttled, on kernels that have it
	discoveredAt time.Time
}

// Read merges the alarms into the flags of get_throttled.
func (p *powerReader) Read(m *ModuleReadings) error {
	if time.Since(p.discoveredAt) >= rediscoverInterval {
		p.discover()
	}
	var got Power
	var failed error
	if p.throttled != nil {
		got, failed = readProc(p.throttled, parseThrottled)
	}
	for _, f := range p.alarms {
		isLow, err := readProc(f, parseFlag)
		if err != nil {
			failed = err
		} else if got.UnderVoltage == nil || isLow {
			got.UnderVoltage = &isLow
		}
	}
	if got == (Power{}) {
		return failed
	}
	m.Power = &got
	return nil
}

// Close closes the files.
func (p *powerReader) Close() error {
	for _, f := range p.alarms {
		f.close()
	}
	if p.throttled != nil {
		p.throttled.close()
	}
	return nil
}

// discover finds the files of the supply, which other boards do not have.
func (p *powerReader) discover() {
	p.Close()
	p.alarms, p.throttled, p.discoveredAt = nil, nil, time.Now()
	for _, dir := range listEntries(p.root+"sys/class/hwmon", "hwmon") {
		if readText(dir+"/name") != "rpi_volt" {
			continue
		}
		for _, path := range listEntries(dir, "in") {
			if strings.HasSuffix(path, "_lcrit_alarm") {
				p.alarms = append(p.alarms, new(newProcFile(path, 8)))
			}
		}
	}
	// From the Pi 5 on the device's name contains the bus address, so look through its
	// driver as well. Since 4.19 the kernel logs once that the file is deprecated; nothing
	// else reports throttling.
	paths := []string{p.root + "sys/devices/platform/soc/soc:firmware/get_throttled"}
	for _, dir := range listEntries(p.root+"sys/bus/platform/drivers/raspberrypi-firmware", "") {
		paths = append(paths, dir+"/get_throttled")
	}
	for _, path := range paths {
		if exists(path) {
			p.throttled = new(newProcFile(path, 24))
			return
		}
	}
}

// wearReader reads the wear of the eMMCs. Its files are not kept open, since it is read
// once an hour.
type wearReader struct{ root string }

// Read leaves out cards that report nothing.
func (g wearReader) Read(m *ModuleReadings) error {
	var got Wear
	var failed error
	for _, dir := range listEntries(g.root+"sys/block", "mmcblk") {
		// Not the boot partitions, mmcblk0boot0.
		if _, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), "mmcblk")); err != nil {
			continue
		}
		d, err := readWearDevice(dir)
		if err != nil {
			failed = err
		}
		if d.UsedPct == nil && d.PreEOL == "" || len(got.Devices) >= maxWearDevices {
			continue
		}
		got.Devices = append(got.Devices, d)
		if got.UsedPct == nil || d.UsedPct != nil && *d.UsedPct > *got.UsedPct {
			got.UsedPct = d.UsedPct
		}
		if eolRank(d.PreEOL) > eolRank(got.PreEOL) {
			got.PreEOL = d.PreEOL
		}
	}
	if got.Devices == nil {
		return failed
	}
	m.Wear = &got
	return nil
}

// Close does nothing.
func (g wearReader) Close() error { return nil }

// readWearDevice reads one eMMC. What it does not have is left out: SD cards have none.
func readWearDevice(dir string) (WearDevice, error) {
	d := WearDevice{Name: filepath.Base(dir)}
	life, err := readLimited(dir+"/device/life_time", 64)
	if err == nil {
		var pct float64
		var known bool
		if pct, known, err = parseLifeTime(life); known {
			d.UsedPct = &pct
		}
	}
	eol, eolErr := readLimited(dir+"/device/pre_eol_info", 64)
	if eolErr == nil {
		d.PreEOL, eolErr = parsePreEOL(eol)
	}
	for _, e := range []error{err, eolErr} {
		if e != nil && !errors.Is(e, os.ErrNotExist) {
			return d, fmt.Errorf("read wear of %s: %w; try: head %s/device/life_time %s/device/pre_eol_info", d.Name, e, dir, dir)
		}
	}
	return d, nil
}

// eolRank orders the states of PreEOL; unknown is -1.
func eolRank(s string) int { return slices.Index(EOLStates, s) }

// listEntries lists what in dir has a name of prefix and something after it, by the number
// that follows it and then by name; nothing when there is no such directory.
func listEntries(dir, prefix string) []string {
	d, err := os.Open(dir)
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(maxEntries)
	names = slices.DeleteFunc(names, func(n string) bool { return len(n) <= len(prefix) || !strings.HasPrefix(n, prefix) })
	number := func(n string) uint64 {
		v, _, _ := parseUint([]byte(n[len(prefix):]))
		return v
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(number(a), number(b)), cmp.Compare(a, b)) })
	for i, n := range names {
		names[i] = dir + "/" + n
	}
	return names
}

// readText is the text of a small file, printable; "" when there is none.
func readText(path string) string {
	b, err := readLimited(path, 256)
	if err != nil {
		return ""
	}
	return printable(string(b))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
