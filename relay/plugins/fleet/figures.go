package fleet

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"agentctl/manifest"
	"agentctl/relay/kernel"
)

// Besides its history (query_now.go), a board has two sources of figures. A metrics frame
// (metrics.snapshot, or a frame of an open stream) has what the board samples anyway; system.modules costs
// more, because it reads sensors. Either has all of its figures in one answer: what is absent there is not
// measured. So a figure is in one of three states:
//
//	value         time
//	a number      at most maxFigureAge ago   known
//	NaN           at most maxFigureAge ago   the board does not measure it; it is not asked again
//	any           older                      unknown; the board is asked if somebody needs it

// metric is a figure of a board that the tools of this package name. The keys are those of alert
// rules; the catalogue of package prober defines them (test/fleet_test.go compares).
type metric struct {
	key    string // in where, and in answers
	module string // the group that it belongs to
	// history is the name in system.history. It is also the path in an answer of system.modules,
	// for those metrics that a metrics frame does not have.
	history string
	// isModule is set for figures that come from system.modules, and not from a metrics frame.
	isModule bool
}

// metrics lists the figures, in the order in which answers and messages name them.
var metrics = [...]metric{
	{key: "cpu_pct", module: "cpu", history: "cpu.usage_percent"},
	{key: "mem_pct", module: "memory"}, // of mem_bytes and mem_total_bytes
	{key: "mem_bytes", module: "memory", history: "mem_bytes"},
	{key: "mem_total_bytes", module: "memory", history: "mem_total_bytes"},
	{key: "disk_pct", module: "disk", history: "disk.usage_percent"},
	{key: "load_1m", module: "load", history: "load.load_1m"},
	{key: "load_5m", module: "load", history: "load.load_5m"},
	{key: "load_15m", module: "load", history: "load.load_15m"},
	{key: "temperature_c", module: "temperature", history: "temperature.hottest_c", isModule: true},
	{key: "net_bytes_in_per_s", module: "network", history: "network.bytes_in_per_s", isModule: true},
	{key: "net_bytes_out_per_s", module: "network", history: "network.bytes_out_per_s", isModule: true},
	{key: "under_voltage", module: "power", history: "power.under_voltage", isModule: true},
	{key: "freq_capped", module: "power", history: "power.freq_capped", isModule: true},
	{key: "throttled", module: "power", history: "power.throttled", isModule: true},
	{key: "soft_temp_limit", module: "power", history: "power.soft_temp_limit", isModule: true},
	{key: "wear_pct", module: "wear", history: "wear.used_pct", isModule: true},
	{key: "wear_pre_eol", module: "wear", history: "wear.pre_eol", isModule: true}, // 1 normal, 2 warning, 3 urgent
}

// numMetrics is the length of arrays with an element for each metric.
const numMetrics = len(metrics)

// metricIndex returns the index of a metric in metrics; -1 for an unknown one.
func metricIndex(key string) int {
	for i := range metrics {
		if metrics[i].key == key {
			return i
		}
	}
	return -1
}

// metricKeys are the keys of metrics, in their order.
var metricKeys = func() []string {
	list := make([]string, len(metrics))
	for i := range metrics {
		list[i] = metrics[i].key
	}
	return list
}()

// metricKeyList has the keys for messages.
var metricKeyList = strings.Join(metricKeys, ", ")

// figures are the newest known values of one board's metrics, NaN for unknown ones, and when the relay
// got them or learned that the board has no such value, Unix ms. So NaN with a fresh time means that the
// board does not measure this, and with an old one that nobody knows.
type figures struct {
	values [numMetrics]float64
	times  [numMetrics]int64
}

// newFigures returns figures of which none is known.
func newFigures() *figures {
	f := new(figures)
	for i := range f.values {
		f.values[i] = math.NaN()
	}
	return f
}

// at is the time of a metric's value.
func (f *figures) at(i int) time.Time { return time.UnixMilli(f.times[i]) }

// isFresh reports whether the value of a metric, or that there is none, is known and not too old.
func (f *figures) isFresh(i int, now time.Time) bool { return now.Sub(f.at(i)) <= maxFigureAge }

// modules are the groups of figures of which one is known, as in "temperature".
func (f *figures) modules() (list []string) {
	for i := range metrics {
		if module := metrics[i].module; !math.IsNaN(f.values[i]) && !slices.Contains(list, module) {
			list = append(list, module)
		}
	}
	return list
}

// readFrame takes the values of a metrics frame or snapshot, which the relay has checked.
func (f *figures) readFrame(raw []byte, at time.Time) {
	var v map[string]any
	if json.Unmarshal(raw, &v) != nil {
		return
	}
	for i := range metrics {
		if !metrics[i].isModule {
			f.values[i], f.times[i] = metrics[i].possible(number(v[metrics[i].key])), at.UnixMilli()
		}
	}
	i := metricIndex("mem_pct")
	// A frame has bytes. Without a total this is NaN or infinite, and possible makes it NaN.
	f.values[i] = metrics[i].possible(math.Round(1000*number(v["mem_bytes"])/number(v["mem_total_bytes"])) / 10)
}

// readModules takes the values of an answer of system.modules, which the relay has checked. A module that the
// answer lacks makes its figures unknown, with the time of the answer.
func (f *figures) readModules(raw []byte, at time.Time) {
	var v map[string]any
	if json.Unmarshal(raw, &v) != nil {
		return
	}
	for i := range metrics {
		if metrics[i].isModule {
			// "power.throttled" is the member throttled of the object power; absent members are NaN.
			_, field, _ := strings.Cut(metrics[i].history, ".")
			members, _ := v[metrics[i].module].(map[string]any)
			f.values[i], f.times[i] = metrics[i].possible(number(members[field])), at.UnixMilli()
		}
	}
}

// number is a JSON value as a number: flags are 0 and 1, states of wear 1 to 3, anything else NaN.
func number(v any) float64 {
	switch v := v.(type) {
	case float64:
		return v
	case bool:
		if v {
			return 1
		}
		return 0
	case string:
		switch v {
		case "normal":
			return 1
		case "warning":
			return 2
		case "urgent":
			return 3
		}
	}
	return math.NaN()
}

// maxFigureAge is how old a figure may be before its board is asked again.
const maxFigureAge = 30 * time.Second

// maxCachedFigures bounds the boards of figureCache: those that can be linked at a time. An entry
// has some 300 bytes.
const maxCachedFigures = 20_000

// figureCache has the figures of the boards that this plugin has asked. The zero value is empty.
type figureCache struct {
	mu     sync.Mutex          // protects boards and what they point to; a leaf
	boards map[string]*figures // by Plugin.cacheKey
}

// cacheKey is what the caches have a board's answers to a caller under: its id, unless stages may answer
// other callers differently. Then it is the board of this caller and connection, which is no board's id,
// so that the frames of others' streams do not count either.
func (p *Plugin) cacheKey(r *kernel.Request, nodeID string) string {
	if !p.opt.Differs() {
		return nodeID
	}
	// None of the parts contains NUL, so the keys of two callers differ.
	return strings.Join([]string{r.Caller.Tenant, r.Caller.Actor, r.Caller.Transport, r.ConnID, nodeID}, "\x00")
}

// get returns a copy of what is known of a board and no older than maxFigureAge. The newest frame of
// an open stream counts, if there is one.
func (c *figureCache) get(boards Boards, key string, now time.Time) figures {
	f := newFigures()
	c.mu.Lock()
	if known := c.boards[key]; known != nil {
		*f = *known
	}
	c.mu.Unlock()
	// The time of cpu_pct is used for all figures of frames, which come together. A value from the history
	// may have made it newer than the others: then the frame is not used, and the board may be asked.
	if frame, at, ok := boards.Frame(key); ok && at.After(f.at(metricIndex("cpu_pct"))) {
		f.readFrame(frame, at)
	}
	for i := range f.values {
		if !f.isFresh(i, now) {
			f.values[i] = math.NaN()
		}
	}
	return *f
}

// put stores what a board has just answered: a snapshot if kind is manifest.KindMetrics, else its modules. A
// full cache drops what is too old, and then starts over.
func (c *figureCache) put(key, kind string, answer []byte, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.boardLocked(key, now); kind == manifest.KindMetrics {
		f.readFrame(answer, now)
	} else {
		f.readModules(answer, now)
	}
}

// putValues is put for values of a board's history, by index in metrics. NaN is skipped: it does not say
// whether the board measures it. The values get the time of the answer, although the sample may be older
// by maxFigureAge, or by freshWearTime.
func (c *figureCache) putValues(key string, values []float64, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.boardLocked(key, now)
	for i, v := range values {
		if !math.IsNaN(v) {
			f.values[i], f.times[i] = v, now.UnixMilli()
		}
	}
}

// boardLocked returns the figures of a board, new ones if it has none. mu is held.
func (c *figureCache) boardLocked(key string, now time.Time) *figures {
	f := c.boards[key]
	if f == nil {
		if len(c.boards) >= maxCachedFigures {
			c.evictLocked(now)
		}
		if c.boards == nil {
			c.boards = make(map[string]*figures)
		}
		f = newFigures()
		c.boards[key] = f
	}
	return f
}

// evictLocked drops the boards of which every figure is too old, or all boards if the cache is full of
// newer ones. mu is held. It reads all entries, but is called only when a board is new to a full cache.
func (c *figureCache) evictLocked(now time.Time) {
	for id, f := range c.boards {
		if now.Sub(time.UnixMilli(slices.Max(f.times[:]))) > maxFigureAge {
			delete(c.boards, id)
		}
	}
	if len(c.boards) >= maxCachedFigures {
		clear(c.boards)
	}
}
