package handlers_test

import (
	"context"
	"encoding/json"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"agentctl/handlers"
	"agentctl/manifest"
	"agentctl/prober"
	"agentctl/prober/inspect"
)

const inspectedNode = "01hzx9k3m4p7q8r9s0t1v2w3xy"

// inspected is a mux with the handlers of a machine.
func inspected(t *testing.T, o handlers.InspectionOptions) func(kind, args string) (string, error) {
	t.Helper()
	if o.Clock == nil {
		o.Clock = func() (int64, bool) { return 1_795_132_800_000, true }
	}
	mux, err := handlers.New(handlers.Options{}, handlers.Inspections(o)...)
	if err != nil {
		t.Fatal(err)
	}
	return func(kind, args string) (string, error) {
		c := manifest.Inspection(kind)
		tools, err := manifest.Project(inspectedNode, &c)
		if err != nil {
			t.Fatal(err)
		}
		raw, _, err := mux.Call(t.Context(), tools[0].Name(), []byte(args))
		if err == nil {
			if err := manifest.CheckAnswer(&tools[0], []byte(args), raw); err != nil {
				t.Errorf("%s %s: the relay refuses the answer: %v\n%s", kind, args, err, raw)
			}
			if len(raw) > 60<<10 {
				t.Errorf("%s %s: the answer has %d bytes", kind, args, len(raw))
			}
		}
		return string(raw), err
	}
}

var inspectedKinds = []string{manifest.KindInfo, manifest.KindModules, manifest.KindProcesses, manifest.KindDisks, manifest.KindNetwork, manifest.KindDoctor}

// The mock board and the machine that runs this test answer what the relay accepts.
func TestInspectionsAnswerTheirSchemas(t *testing.T) {
	mock := inspect.NewMock(3, prober.NewMockHistory(3, time.Now()), "1.2.3")
	doctor := func(context.Context) *handlers.DoctorReport {
		return &handlers.DoctorReport{Checks: []handlers.DoctorCheck{{"clock", "warn", "it is late\x00", "wait"}}, Warnings: 1, Unfinished: []string{"token"}}
	}
	options := map[string]handlers.InspectionOptions{"mock": {Machine: mock, Modules: mock, Doctor: doctor}}
	if m := inspect.New(inspect.Options{Version: "1.2.3"}); m != nil {
		options["this machine"] = handlers.InspectionOptions{Machine: m, Modules: prober.New(prober.Options{}), Doctor: doctor}
	}
	for name, o := range options {
		call := inspected(t, o)
		for _, kind := range inspectedKinds {
			if raw, err := call(kind, `{}`); err != nil || len(raw) < 20 {
				t.Errorf("%s: %s answers %s, %v", name, kind, raw, err)
			}
		}
	}
	call := inspected(t, options["mock"])
	for _, tt := range []struct{ kind, args, want string }{
		{manifest.KindInfo, `{}`, `"agent_version":"1.2.3","hostname":"mock-3"`},
		{manifest.KindModules, `{"modules":["wear","temperature"]}`, `"unavailable":["wear"]`},
		{manifest.KindProcesses, `{"sort_by":"memory","limit":1}`, `"processes":[{"pid":412,"ppid":1,"name":"python3"`},
		{manifest.KindProcesses, `{"name":"SSHD"}`, `"matching":1`},
		{manifest.KindDisks, `{}`, `{"mount":"/","device":"/dev/mmcblk0p2"`},
		{manifest.KindNetwork, `{"interface":"eth0"}`, `"total_interfaces":1`},
		{manifest.KindDoctor, `{}`, `{"checks":[{"name":"clock","status":"warn","message":"it is late","next":"wait"}],"warnings":1,"failures":0,"unfinished":["token"]}`},
	} {
		if raw, err := call(tt.kind, tt.args); err != nil || !strings.Contains(raw, tt.want) {
			t.Errorf("%s %s: got %s, %v; want %s", tt.kind, tt.args, raw, err, tt.want)
		}
	}
	for _, kind := range []string{manifest.KindDisks, manifest.KindNetwork} {
		if _, err := call(kind, `{"cursor":"999999999"}`); manifest.AsError(err).Code != manifest.ManifestInvalid {
			t.Errorf("%s with a cursor beyond the end: %v", kind, err)
		}
	}
}

// hostile is a machine with as much of everything as there can be, of the worst text.
type hostile struct{ query inspect.ProcessQuery }

func (h *hostile) text(n int) string { return inspect.Text(strings.Repeat(`"\<🙂`, n), n) }

func (h *hostile) Info(context.Context) inspect.Info {
	return inspect.Info{AgentVersion: h.text(64), Arch: h.text(32), CPUs: 1, Hostname: h.text(253), Model: h.text(128), OS: h.text(128), Kernel: h.text(128),
		Virtualization: h.text(64), CPUModel: h.text(128), Timezone: h.text(64)}
}

func (h *hostile) Processes(_ context.Context, q inspect.ProcessQuery) inspect.Processes {
	h.query = q
	out := inspect.Processes{Total: 100_000, Matching: 100_000}
	for i := range q.Limit {
		p := inspect.Process{PID: i, Name: h.text(64), User: h.text(32), State: "other"}
		if q.Args {
			p.Args = h.text(512)
		}
		out.Processes = append(out.Processes, p)
	}
	return out
}

// How many elements a hostile machine has: more than are read at a time, in dozens of pages. With
// AGENTCTL_SLOW=1 they are several times as many.
var hostileMounts, hostileInterfaces, hostileRoutes = hostileSize()

func hostileSize() (mounts, interfaces, routes int) {
	if os.Getenv("AGENTCTL_SLOW") != "" {
		return 600, 500, 2000
	}
	return inspect.MaxFilesystems + 20, inspect.MaxInterfaces + 20, inspect.MaxRoutes + 20
}

func (h *hostile) Disks(_ context.Context, skip int) inspect.Disks {
	out := inspect.Disks{Total: hostileMounts, Filesystems: []inspect.Filesystem{}}
	for i := skip; i < min(out.Total, skip+inspect.MaxFilesystems); i++ {
		out.Filesystems = append(out.Filesystems, inspect.Filesystem{Mount: strconv.Itoa(i) + h.text(240), Device: h.text(256), Type: h.text(32)})
	}
	for range inspect.MaxDisks {
		if skip == 0 {
			out.Disks = append(out.Disks, inspect.Disk{Name: h.text(64), Model: h.text(64)})
		}
	}
	return out
}

func (h *hostile) Network(_ context.Context, q inspect.NetworkQuery) inspect.Network {
	out := inspect.Network{TotalInterfaces: hostileInterfaces, TotalRoutes: hostileRoutes, Interfaces: []inspect.Interface{}, Routes: []inspect.Route{}}
	for i := q.Skip; i < min(out.TotalInterfaces, q.Skip+inspect.MaxInterfaces); i++ {
		out.Interfaces = append(out.Interfaces, inspect.Interface{Name: strconv.Itoa(i), MAC: h.text(64), Addresses: slices.Repeat([]string{h.text(64)}, 32)})
	}
	if from := q.Skip + len(out.Interfaces) - out.TotalInterfaces; from >= 0 {
		for i := from; i < min(out.TotalRoutes, from+inspect.MaxRoutes); i++ {
			out.Routes = append(out.Routes, inspect.Route{Destination: strconv.Itoa(i), Gateway: h.text(64), Interface: h.text(64)})
		}
	}
	return out
}

func (h *hostile) ReadModules(context.Context, prober.ModuleSet) (prober.ModuleReadings, prober.ModuleSet) {
	return prober.ModuleReadings{}, prober.OptionalModules
}

// Answers stay small and valid whatever the machine has, and pages have each element once.
func TestInspectionsAreBounded(t *testing.T) {
	h, shown := &hostile{}, false
	report := &handlers.DoctorReport{}
	for range 100 {
		report.Checks = append(report.Checks, handlers.DoctorCheck{strings.Repeat("x", 100), "ok", strings.Repeat(`"`, 5000), strings.Repeat("\x01🙂", 5000)})
		report.Unfinished = append(report.Unfinished, strings.Repeat("y", 100))
	}
	o := handlers.InspectionOptions{Machine: h, Modules: h, Arguments: func() bool { return shown }, Doctor: func(context.Context) *handlers.DoctorReport { return report }}
	// Each page is one call of many, which the rate of the capability does not admit at once.
	synctest.Test(t, func(t *testing.T) {
		call := inspected(t, o)
		for _, kind := range inspectedKinds {
			if _, err := call(kind, `{}`); err != nil {
				t.Errorf("%s: %v", kind, err)
			}
		}
		if h.query != (inspect.ProcessQuery{SortBy: "cpu", Limit: 10, Window: 500 * time.Millisecond}) {
			t.Errorf("the defaults are %+v", h.query)
		}
		shown = true
		raw, err := call(manifest.KindProcesses, `{"limit":50,"window_ms":100}`)
		if err != nil || !h.query.Args || !strings.Contains(raw, `"unfinished":["details"]`) {
			t.Errorf("with arguments: %v, asked %+v", err, h.query)
		}
		type answer struct {
			Filesystems []struct{ Mount string }
			Interfaces  []struct{ Name string }
			Routes      []struct{ Destination string }
			Next        string `json:"next_cursor"`
		}
		for kind, want := range map[string]int{manifest.KindDisks: hostileMounts, manifest.KindNetwork: hostileInterfaces + hostileRoutes} {
			seen, args, pages := map[string]bool{}, `{}`, 0
			for ; pages < 1000 && args != ""; pages++ {
				time.Sleep(time.Second)
				raw, err := call(kind, args)
				var a answer
				if err != nil || json.Unmarshal([]byte(raw), &a) != nil {
					t.Fatalf("%s %s: %v", kind, args, err)
				}
				for _, f := range a.Filesystems {
					seen[strings.TrimRight(f.Mount, `"\<🙂`)] = true
				}
				for _, i := range a.Interfaces {
					seen["interface "+i.Name] = true
				}
				for _, r := range a.Routes {
					seen["route "+r.Destination] = true
				}
				if args = ""; a.Next != "" {
					args = `{"cursor":"` + a.Next + `"}`
				}
			}
			if len(seen) != want {
				t.Errorf("%s: %d pages have %d different elements, want %d", kind, pages, len(seen), want)
			}
		}
	})
}

// unreadable is a machine whose lists could not be read in time.
type unreadable struct{ hostile }

func (*unreadable) Disks(context.Context, int) inspect.Disks {
	return inspect.Disks{Filesystems: []inspect.Filesystem{}, Unfinished: []string{"filesystems"}}
}

func (*unreadable) Network(context.Context, inspect.NetworkQuery) inspect.Network {
	return inspect.Network{TotalInterfaces: 3, Interfaces: []inspect.Interface{}, Routes: []inspect.Route{}, Unfinished: []string{"routes"}}
}

// A cursor is not refused because the list could not be read for its page: the total is not known then.
func TestCursorOfUnreadList(t *testing.T) {
	call := inspected(t, handlers.InspectionOptions{Machine: new(unreadable), Modules: new(hostile), Doctor: func(context.Context) *handlers.DoctorReport { return new(handlers.DoctorReport) }})
	for _, kind := range []string{manifest.KindDisks, manifest.KindNetwork} {
		raw, err := call(kind, `{"cursor":"64"}`)
		if err != nil || !strings.Contains(raw, `"unfinished":["`) || strings.Contains(raw, "next_cursor") {
			t.Errorf("%s: got %s, %v; want an unfinished answer without a next page", kind, raw, err)
		}
	}
}
