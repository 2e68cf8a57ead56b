package alert

import (
	"encoding/json"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"agentctl/prober"
)

// at is a sample with one figure, taken at a second.
func at(second int, set func(*prober.Sample)) prober.Sample {
	s := prober.Sample{
		TSMS: prober.MinTSMS + int64(second)*1000,
		Mono: time.Duration(second) * time.Second,
		// Nothing that a default rule minds.
		CPUPct: 5, MemBytes: 30, MemTotalBytes: 100, DiskPct: 40,
	}
	set(&s)
	return s
}

func disk(v float64) func(*prober.Sample) { return func(s *prober.Sample) { s.DiskPct = v } }

func extra(m prober.ModuleReadings) func(*prober.Sample) {
	return func(s *prober.Sample) { s.Modules = &m }
}

func heated(c float64) func(*prober.Sample) {
	return extra(prober.ModuleReadings{Temperature: &prober.Temperature{HottestC: c, Zones: []prober.Zone{{Name: "cpu", C: c}}}})
}

func fed(low bool) func(*prober.Sample) {
	return extra(prober.ModuleReadings{Power: &prober.Power{UnderVoltage: &low}})
}

func engine(t testing.TB, rules ...Rule) *Engine {
	t.Helper()
	e, err := New(rules)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// brief is an event in a word.
func brief(events []Event) string {
	var s []string
	for _, e := range events {
		sign := "+"
		if e.Cleared {
			sign = "-"
		}
		s = append(s, sign+e.RuleID)
	}
	return strings.Join(s, " ")
}

type step struct {
	second int
	set    func(*prober.Sample)
	want   string
}

func run(t *testing.T, e *Engine, steps []step) {
	t.Helper()
	for _, s := range steps {
		if got := brief(e.Evaluate(at(s.second, s.set))); got != s.want {
			t.Errorf("at %d s: got %q, want %q", s.second, got, s.want)
		}
	}
}

func none(*prober.Sample) {}

func TestEvaluate(t *testing.T) {
	full := Rule{ID: "full", Metric: "disk_pct", Op: AtLeast, Threshold: 95, Hysteresis: 5, Level: Error}
	slow := full
	slow.For = 10 * time.Second
	slowBack := full
	slowBack.ClearFor = 10 * time.Second
	above := Rule{ID: "above", Metric: "disk_pct", Op: Above, Threshold: 95, Level: Warn}
	cold := Rule{ID: "cold", Metric: "temperature_c", Op: Below, Threshold: -10, Hysteresis: 2, Level: Info}
	atMost := Rule{ID: "frost", Metric: "temperature_c", Op: AtMost, Threshold: 0, Hysteresis: 1, Level: Info}
	tests := []struct {
		name  string
		rules []Rule
		steps []step
	}{
		{"raised once, cleared once, below the band", []Rule{full}, []step{
			{0, disk(94.99), ""}, {1, disk(95), "+full"}, {2, disk(99), ""}, {3, disk(90), ""}, {4, disk(89.99), "-full"}, {5, disk(20), ""}, {6, disk(95), "+full"},
		}},
		{"above and no hysteresis", []Rule{above}, []step{
			{0, disk(95), ""}, {1, disk(95.01), "+above"}, {2, disk(95), "-above"},
		}},
		{"downwards", []Rule{cold}, []step{
			{0, heated(-10), ""}, {1, heated(-10.1), "+cold"}, {2, heated(-8.1), ""}, {3, heated(-8), "-cold"},
		}},
		{"downwards and equal", []Rule{atMost}, []step{
			{0, heated(0.1), ""}, {1, heated(0), "+frost"}, {2, heated(1), ""}, {3, heated(1.1), "-frost"},
		}},
		{"only when it holds", []Rule{slow}, []step{
			{0, disk(96), ""}, {9, disk(96), ""}, {10, disk(96), "+full"}, {11, disk(50), ""}, {20, disk(50), ""}, {21, disk(50), "-full"},
		}},
		{"holding is not made of pieces", []Rule{slow}, []step{
			{0, disk(96), ""}, {9, disk(94), ""}, {10, disk(96), ""}, {19, disk(96), ""}, {20, disk(96), "+full"},
		}},
		{"nor is being well", []Rule{slowBack}, []step{
			{0, disk(96), "+full"}, {1, disk(20), ""}, {10, disk(92), ""}, {12, disk(20), ""}, {21, disk(20), ""}, {22, disk(20), "-full"},
		}},
		{"a figure that is not there changes nothing", []Rule{cold}, []step{
			{0, none, ""}, {1, heated(-20), "+cold"}, {2, none, ""}, {3, heated(-20), ""}, {4, none, ""}, {5, heated(20), "-cold"}, {6, none, ""},
		}},
		{"and what waits for it waits anew", []Rule{{ID: "dip", Metric: "under_voltage", Op: AtLeast, Threshold: 1, For: 5 * time.Second, Level: Error}}, []step{
			{0, fed(true), ""}, {3, none, ""}, {5, fed(true), ""}, {9, fed(true), ""}, {10, fed(true), "+dip"},
		}},
		{"several, in their order", []Rule{above, full}, []step{
			{0, disk(96), "+above +full"}, {1, disk(94), "-above"}, {2, disk(0), "-full"},
		}},
		{"the samples' clock began anew", []Rule{slow}, []step{
			{100, disk(96), ""}, {3, disk(96), ""}, {12, disk(96), ""}, {13, disk(96), "+full"},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { run(t, engine(t, tt.rules...), tt.steps) })
	}
}

func TestDefaultRules(t *testing.T) {
	e := engine(t, DefaultRules()...)
	if got, want := e.Modules(), []string{"power", "temperature", "wear"}; !slices.Equal(got, want) {
		t.Errorf("modules %v, want %v", got, want)
	}
	memory := func(used uint64) func(*prober.Sample) { return func(s *prober.Sample) { s.MemBytes = used } }
	worn := func(pct float64, eol string) func(*prober.Sample) {
		return extra(prober.ModuleReadings{Wear: &prober.Wear{UsedPct: &pct, PreEOL: eol}})
	}
	run(t, e, []step{
		{0, none, ""},
		{1, disk(95), "+disk-full"}, {2, disk(93), ""}, {3, disk(92), "-disk-full"},
		{10, heated(80), ""}, {19, heated(90), ""}, {20, heated(80), "+too-hot"}, {30, heated(75), ""}, {31, heated(74.9), ""}, {41, heated(74), "-too-hot"},
		// A dip each 30 s is one alert.
		{50, fed(true), "+under-voltage"}, {52, fed(false), ""}, {80, fed(true), ""}, {82, fed(false), ""}, {110, fed(true), ""}, {112, fed(false), ""}, {172, fed(false), "-under-voltage"},
		{200, memory(95), ""}, {259, memory(96), ""}, {260, memory(95), "+memory-full"}, {261, memory(20), ""}, {321, memory(20), "-memory-full"},
		{400, worn(80, prober.EOLNormal), ""}, {401, worn(90, prober.EOLNormal), "+flash-worn"}, {402, worn(90, prober.EOLUrgent), "+flash-reserve"},
	})
	if got := brief(e.Active()); got != "+flash-worn +flash-reserve" {
		t.Errorf("active: %s", got)
	}
}

// The event is what docs/control.md says of `alert`: seven members, no others.
func TestEventOnTheWire(t *testing.T) {
	e := engine(t, DefaultRules()...)
	var got []string
	for i, set := range []func(*prober.Sample){disk(96.1), disk(50), fed(true), none, none} {
		second := i
		if i == 4 {
			set, second = fed(false), 100
			e.Evaluate(at(40, fed(false)))
		}
		for _, ev := range e.Evaluate(at(second, set)) {
			b, err := json.Marshal(ev)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, string(b))
		}
	}
	want := []string{
		`{"level":"error","metric":"disk_pct","value":96.1,"threshold":95,"rule_id":"disk-full","message":"disk use is 96.1 %, at least 95 %; free some space: journalctl --vacuum-size=50M, then du -xh / | sort -h | tail","ts":1700000000000}`,
		`{"level":"info","metric":"disk_pct","value":50,"threshold":95,"rule_id":"disk-full","message":"cleared: disk use is 50 %","ts":1700000001000}`,
		`{"level":"error","metric":"under_voltage","value":1,"threshold":1,"rule_id":"under-voltage","message":"the supply voltage is too low; use the board's own power supply and a short cable","ts":1700000002000}`,
		`{"level":"info","metric":"under_voltage","value":0,"threshold":1,"rule_id":"under-voltage","message":"cleared: the supply voltage is good","ts":1700000100000}`,
	}
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i] != want[i] {
			t.Errorf("event %d:\n got %v\nwant %v", i, got[min(i, len(got)-1):], want[min(i, len(want)-1):])
			break
		}
	}
}

// Whatever a rule and a figure are, a message is a line that a frame can carry.
func TestMessages(t *testing.T) {
	for _, sensor := range metrics {
		m := &sensor.Metric
		for _, op := range []Op{Above, AtLeast, Below, AtMost} {
			mid := m.Max / 2
			if m.Max == 3 {
				mid = 2
			}
			r := Rule{ID: strings.Repeat("a", 64), Metric: m.Name, Op: op, Threshold: mid, For: maxWait, ClearFor: 1, Level: Warn}
			if err := Check([]Rule{r}); err != nil {
				t.Errorf("%s %s: %v", m.Name, op, err)
			}
			for _, v := range []float64{m.Min, m.Max, mid, m.Max / 3} {
				st := ruleState{Rule: r, sensor: sensor}
				for range 2 {
					st.raised = !st.raised
					ev := st.newEvent(v, 1)
					if len(ev.Message) > 512 || strings.ContainsFunc(ev.Message, func(c rune) bool { return c < ' ' || c > '~' }) ||
						strings.HasPrefix(ev.Message, "cleared: ") != ev.Cleared {
						t.Errorf("%d bytes: %q", len(ev.Message), ev.Message)
					}
				}
			}
		}
	}
}

func TestCheck(t *testing.T) {
	good := Rule{ID: "a", Metric: "disk_pct", Op: AtLeast, Threshold: 95, Hysteresis: 2, Level: Warn}
	tests := []struct {
		name string
		set  func(*Rule)
		want string // in the error; "" is none
	}{
		{"good", func(*Rule) {}, ""},
		{"the whole band", func(r *Rule) { r.Op, r.Hysteresis = Above, 95 }, ""},
		{"no id", func(r *Rule) { r.ID = "" }, "alert rule number 1: its id must be"},
		{"a long id", func(r *Rule) { r.ID = strings.Repeat("a", 65) }, "its id must be"},
		{"capitals", func(r *Rule) { r.ID = "Disk" }, `alert rule "Disk": its id must be`},
		{"verbs in the id", func(r *Rule) { r.ID = "%d%s" }, `alert rule "%d%s": its id must be`},
		{"a dash first", func(r *Rule) { r.ID = "-a" }, "begin with a letter"},
		{"no level", func(r *Rule) { r.Level = "" }, "choose info, warn or error"},
		{"another level", func(r *Rule) { r.Level = "fatal" }, `level "fatal"; choose info, warn or error`},
		{"a metric misspelt", func(r *Rule) { r.Metric = "disk" }, `no metric "disk"; choose from cpu_pct, mem_pct, disk_pct`},
		{"no op", func(r *Rule) { r.Op = "" }, "choose >, >=, < or <="},
		{"another op", func(r *Rule) { r.Op = "==" }, `op "=="; choose >, >=, < or <=`},
		{"a share", func(r *Rule) { r.Threshold = 950 }, "threshold 950 is outside 0..100 of disk_pct"},
		{"NaN", func(r *Rule) { r.Threshold = math.NaN() }, "threshold NaN is outside"},
		{"Inf", func(r *Rule) { r.Threshold = math.Inf(1) }, "threshold +Inf is outside"},
		{"negative load", func(r *Rule) { r.Metric, r.Threshold = "load_1m", -1 }, "threshold -1 is outside 0 and more of load_1m"},
		{"never", func(r *Rule) { r.Op, r.Threshold = Above, 100 }, "can never be true"},
		{"never below", func(r *Rule) { r.Op, r.Threshold = Below, 0 }, "can never be true"},
		{"always", func(r *Rule) { r.Threshold = 0 }, "is always true"},
		{"never back", func(r *Rule) { r.Hysteresis = 95 }, "so large that it could never be cleared"},
		{"never back down", func(r *Rule) { r.Op, r.Threshold, r.Hysteresis = Below, 50, 51 }, "so large that it could never be cleared"},
		{"negative hysteresis", func(r *Rule) { r.Hysteresis = -1 }, "hysteresis -1 is not 0 or more"},
		{"hysteresis NaN", func(r *Rule) { r.Hysteresis = math.NaN() }, "hysteresis NaN"},
		{"hysteresis Inf", func(r *Rule) { r.Op, r.Hysteresis = Below, math.Inf(1) }, "hysteresis +Inf"},
		{"negative for", func(r *Rule) { r.For = -1 }, "for -1ns is outside 0s..24h0m0s"},
		{"a long clear_for", func(r *Rule) { r.ClearFor = 25 * time.Hour }, "clear_for 25h0m0s is outside"},
	}
	for _, tt := range tests {
		r := good
		tt.set(&r)
		err := Check([]Rule{r})
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: got %v, want %q", tt.name, err, tt.want)
		}
		if _, err := New([]Rule{r}); (err == nil) != (tt.want == "") {
			t.Errorf("%s: New says %v", tt.name, err)
		}
	}

	twice := []Rule{good, good}
	if err := Check(twice); err == nil || !strings.Contains(err.Error(), `"a": another rule has the same id`) {
		t.Errorf("the same id twice: %v", err)
	}
	bad := []Rule{{ID: "x"}, good, {ID: "y"}}
	if err := Check(bad); err == nil || strings.Count(err.Error(), "\n") != 5 {
		t.Errorf("two bad rules: %v, want all that is wrong, a line each", err)
	}
	var many []Rule
	for i := range MaxRules + 1 {
		r := good
		r.ID = fmt.Sprint("r", i)
		many = append(many, r)
	}
	if err := Check(many); err == nil || !strings.Contains(err.Error(), "65 alert rules, at most 64") {
		t.Errorf("65 rules: %v", err)
	}
	if err := Check(many[:MaxRules]); err != nil {
		t.Errorf("64 rules: %v", err)
	}
}

func TestReplace(t *testing.T) {
	full := Rule{ID: "full", Metric: "disk_pct", Op: AtLeast, Threshold: 95, Level: Error}
	busy := Rule{ID: "busy", Metric: "cpu_pct", Op: AtLeast, Threshold: 1, For: 10 * time.Second, Level: Info}
	e := engine(t, full, busy)
	run(t, e, []step{{0, disk(96), "+full"}})

	if _, err := e.Replace([]Rule{full, full}); err == nil || len(e.Rules()) != 2 {
		t.Errorf("bad rules: %v, now %v", err, e.Rules())
	}
	// full stays as it is, busy goes on waiting in another place.
	events, err := e.Replace([]Rule{busy, full})
	if err != nil || len(events) != 0 {
		t.Errorf("the same rules: %v, %v", brief(events), err)
	}
	run(t, e, []step{{1, disk(97), ""}, {10, disk(97), "+busy"}})

	changed := full
	changed.Threshold = 90
	events, err = e.Replace([]Rule{changed})
	if err != nil || brief(events) != "-busy -full" {
		t.Errorf("changed and removed: %q, %v", brief(events), err)
	}
	for _, ev := range events {
		if ev.Level != Info || ev.TS != prober.MinTSMS+10_000 || !strings.HasPrefix(ev.Message, "cleared: the rule "+ev.RuleID) {
			t.Errorf("%+v", ev)
		}
	}
	if len(e.Active()) != 0 || !reflect.DeepEqual(e.Rules(), []Rule{changed}) {
		t.Errorf("active %v, rules %v", e.Active(), e.Rules())
	}
	run(t, e, []step{{11, disk(91), "+full"}})
}

// TestMetrics checks that each metric reads its own figure, and is unknown without it.
func TestMetrics(t *testing.T) {
	yes := true
	s := prober.Sample{CPUPct: 1, MemBytes: 2, MemTotalBytes: 100, DiskPct: 3, Load1: 4, Load5: 5, Load15: 6,
		Modules: &prober.ModuleReadings{
			Network:     &prober.Network{WindowMS: 2000, BytesInPerS: 13, BytesOutPerS: 14, ErrorsIn: 20, ErrorsOut: 10},
			Temperature: &prober.Temperature{HottestC: 7},
			Power:       &prober.Power{UnderVoltage: &yes, FreqCapped: new(false), Throttled: &yes, SoftTempLimit: new(false)},
			Wear:        &prober.Wear{UsedPct: new(11.0), PreEOL: prober.EOLUrgent},
		}}
	want := map[string]float64{"cpu_pct": 1, "mem_pct": 2, "disk_pct": 3, "load_1m": 4, "load_5m": 5, "load_15m": 6,
		"temperature_c": 7, "under_voltage": 1, "freq_capped": 0, "throttled": 1, "soft_temp_limit": 0,
		"wear_pct": 11, "wear_pre_eol": 3, "net_bytes_in_per_s": 13, "net_bytes_out_per_s": 14, "net_errors_per_s": 15}
	if len(MetricNames()) != len(want) {
		t.Errorf("%d metrics, %d are tried here", len(MetricNames()), len(want))
	}
	for _, name := range MetricNames() {
		sensor := sensorOf(name)
		if v, ok := sensor.Read(&s); !ok || v != want[name] {
			t.Errorf("%s is %v, %v, want %v", name, v, ok, want[name])
		}
		for _, bare := range []prober.Sample{{MemTotalBytes: 1}, {MemTotalBytes: 1, Modules: &prober.ModuleReadings{}},
			{MemTotalBytes: 1, Modules: &prober.ModuleReadings{Power: &prober.Power{}, Wear: &prober.Wear{}}}} {
			hasTemperature := sensor.Module == prober.ModuleTemperature && bare.Modules != nil && bare.Modules.Temperature != nil
			if _, ok := sensor.Read(&bare); ok != (!sensor.Module.IsOptional() || hasTemperature) {
				t.Errorf("%s of %+v is known: %v", name, bare.Modules, ok)
			}
		}
	}
	if v, ok := sensorOf("mem_pct").Read(&prober.Sample{}); ok {
		t.Errorf("mem_pct without a total is %v", v)
	}
}

func TestEvaluateAllocates(t *testing.T) {
	e := engine(t, DefaultRules()...)
	s := at(0, heated(50))
	if n := testing.AllocsPerRun(100, func() { e.Evaluate(s) }); n != 0 {
		t.Errorf("%v allocations a sample when nothing happens", n)
	}
}

func BenchmarkEvaluate(b *testing.B) {
	many := make([]Rule, MaxRules)
	for i := range many {
		many[i] = Rule{ID: fmt.Sprint("r", i), Metric: MetricNames()[i%len(metrics)], Op: AtLeast, Level: Warn}
		many[i].Threshold = min(metrics[i%len(metrics)].Metric.Max, 90)
	}
	for _, rules := range [][]Rule{DefaultRules(), many} {
		b.Run(fmt.Sprint("rules=", len(rules)), func(b *testing.B) {
			e := engine(b, rules...)
			s := at(0, heated(50))
			b.ReportAllocs()
			for b.Loop() {
				e.Evaluate(s)
			}
		})
	}
}
