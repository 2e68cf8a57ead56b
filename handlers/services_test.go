package handlers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"

	"agentctl/manifest"
)

// fakeSystemd is a connection to a systemd that has these units and properties.
type fakeSystemd struct {
	list   []dbus.UnitStatus
	props  map[string]map[string]any // by unit
	delay  time.Duration             // of each property
	broken bool
	closed int
}

func (f *fakeSystemd) ListUnitsByPatternsContext(_ context.Context, _, patterns []string) ([]dbus.UnitStatus, error) {
	if len(patterns) != 1 || patterns[0] != "*.service" {
		return nil, fmt.Errorf("patterns %q", patterns)
	}
	return append([]dbus.UnitStatus(nil), f.list...), nil
}

func (f *fakeSystemd) GetUnitPropertyContext(ctx context.Context, unit, property string) (*dbus.Property, error) {
	if f.delay > 0 {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(f.delay):
		}
	}
	v, ok := f.props[unit][property]
	if !ok || f.broken {
		return nil, errors.New("no such property")
	}
	return &dbus.Property{Name: property, Value: godbus.MakeVariant(v)}, nil
}

func (f *fakeSystemd) GetServicePropertyContext(ctx context.Context, unit, property string) (*dbus.Property, error) {
	return f.GetUnitPropertyContext(ctx, unit, property)
}

func (f *fakeSystemd) Close() { f.closed++ }

// running are the properties of a service that runs.
func running(pid uint32) map[string]any {
	return map[string]any{"StateChangeTimestamp": uint64(1893456000123456), "MainPID": pid, "NRestarts": uint32(0), "UnitFileState": "enabled", "Result": "success", "ExecMainCode": int32(0), "ExecMainStatus": int32(0)}
}

func newFakeSystemd() *fakeSystemd {
	f := &fakeSystemd{props: map[string]map[string]any{}}
	add := func(name, load, active, sub string, props map[string]any) {
		f.list = append(f.list, dbus.UnitStatus{Name: name + ".service", Description: "The " + name, LoadState: load, ActiveState: active, SubState: sub})
		f.props[name+".service"] = props
	}
	add("ssh", "loaded", "active", "running", running(77))
	add("backup", "loaded", "failed", "failed", map[string]any{"StateChangeTimestamp": uint64(1893456000123456), "NRestarts": uint32(3), "Result": "exit-code",
		"ExecMainCode": int32(1), "ExecMainStatus": int32(2), "ExecMainExitTimestamp": uint64(1893456000120000), "UnitFileState": "disabled", "MainPID": uint32(0)})
	add("eater", "loaded", "failed", "failed", map[string]any{"Result": "oom-kill", "ExecMainCode": int32(2), "ExecMainStatus": int32(9)})
	add("ghost", "not-found", "inactive", "dead", nil)
	add("later", "loaded", "sleeping", "zzz", map[string]any{"Result": "success"})
	add("once", "loaded", "inactive", "dead", map[string]any{"Result": "success", "ExecMainCode": int32(1), "ExecMainStatus": int32(0), "UnitFileState": "static"})
	return f
}

// list calls the handler; its answer has to fit the schema.
func list(t *testing.T, f *fakeSystemd, args string) (page servicesPage, err error) {
	t.Helper()
	s := &Services{func(context.Context) (systemd, error) { return f, nil }}
	raw, _, err := s.Call(t.Context(), manifest.ToolName{}, []byte(args))
	if err != nil {
		return page, err
	}
	if err := manifest.Validate("mcp://schemas/system.services.list.output@1.0.0", raw); err != nil || len(raw) > maxPageSize {
		t.Errorf("%d bytes, %.500s: %v", len(raw), raw, err)
	}
	return page, json.Unmarshal(raw, &page)
}

func names(p servicesPage) string {
	var all []string
	for _, s := range p.Services {
		all = append(all, s.Name)
	}
	return strings.Join(all, " ")
}

func TestServices(t *testing.T) {
	f := newFakeSystemd()
	p, err := list(t, f, `{}`)
	if err != nil || names(p) != "backup eater later once ssh" || p.Total != 5 || p.NextCursor != "" || f.closed != 1 {
		t.Fatalf("%+v, %v; closed %d times", p, err, f.closed)
	}
	got, _ := json.Marshal(p.Services)
	want := `[{"name":"backup","description":"The backup","state":"failed","sub_state":"failed","since_ms":1893456000123,"restarts":3,"enabled":"disabled","last_exit":{"result":"exit-code","code":2,"at_ms":1893456000120}},` +
		`{"name":"eater","description":"The eater","state":"failed","sub_state":"failed","restarts":0,"last_exit":{"result":"oom-kill","signal":9}},` +
		`{"name":"later","description":"The later","state":"other","sub_state":"zzz","restarts":0},` +
		`{"name":"once","description":"The once","state":"inactive","sub_state":"dead","restarts":0,"enabled":"static","last_exit":{"result":"success","code":0}},` +
		`{"name":"ssh","description":"The ssh","state":"active","sub_state":"running","since_ms":1893456000123,"pid":77,"restarts":0,"enabled":"enabled"}]`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	for args, want := range map[string]string{
		`{"state":"failed"}`:                        "backup eater",
		`{"state":"active"}`:                        "later ssh",
		`{"state":"inactive"}`:                      "once",
		`{"name":"SS"}`:                             "ssh",
		`{"name":"nothing"}`:                        "",
		`{"name":"service"}`:                        "", // not part of a name
		`{"limit":2}`:                               "backup eater",
		`{"limit":2,"cursor":"2"}`:                  "later once",
		`{"limit":2,"cursor":"4"}`:                  "ssh",
		`{"cursor":"5"}`:                            "",
		`{"limit":1,"state":"failed","cursor":"1"}`: "eater",
	} {
		if p, err := list(t, f, args); err != nil || names(p) != want {
			t.Errorf("%s: got %q, %v, want %q", args, names(p), err, want)
		}
	}
	if p, _ := list(t, f, `{"limit":2}`); p.NextCursor != "2" || p.Total != 5 {
		t.Errorf("a page of two: %+v", p)
	}
	var e *manifest.Error
	if _, err := list(t, f, `{"cursor":"6"}`); !errors.As(err, &e) || e.Code != manifest.ManifestInvalid {
		t.Errorf("a cursor beyond the end: %v", err)
	}
	f.broken = true
	if p, err := list(t, f, `{}`); err != nil || len(p.Services) != 5 || len(p.Unfinished) != 1 {
		t.Errorf("without properties: %+v, %v", p, err)
	}
}

// TestServicesAreBounded checks pages of many services with long texts.
func TestServicesAreBounded(t *testing.T) {
	f := &fakeSystemd{}
	for i := range 1000 {
		f.list = append(f.list, dbus.UnitStatus{Name: fmt.Sprintf("%0250d.service", i), Description: strings.Repeat("<", 500), LoadState: "loaded", ActiveState: "active", SubState: strings.Repeat("é", 100)})
	}
	seen := 0
	for cursor := ""; ; {
		p, err := list(t, f, `{"limit":200`+cursor+`}`)
		if err != nil || len(p.Services) == 0 {
			t.Fatalf("after %d: %v", seen, err)
		}
		if seen += len(p.Services); p.NextCursor == "" {
			break
		}
		cursor = `,"cursor":"` + p.NextCursor + `"`
	}
	if seen != 1000 {
		t.Errorf("all pages have %d services", seen)
	}
}

// TestServicesTakeTooLong checks that what was read in time is answered.
func TestServicesTakeTooLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystemd()
		f.delay = 100 * time.Millisecond // eight properties a service
		start := time.Now()
		p, err := list(t, f, `{}`)
		if err != nil || len(p.Services) != 5 || len(p.Unfinished) != 1 || p.Services[0].Restarts != 3 || p.Services[4].PID != 0 {
			t.Errorf("%+v, %v", p, err)
		}
		if took := time.Since(start); took > pageTime {
			t.Errorf("took %v", took)
		}
	})
}

// TestServicesWithoutBus checks that no bus, and one that does not answer, end a call.
func TestServicesWithoutBus(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "bus")
	t.Setenv("DBUS_SYSTEM_BUS_ADDRESS", "unix:path="+socket)
	call := func(timeLimit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), timeLimit)
		defer cancel()
		_, _, err := NewServices().Call(ctx, manifest.ToolName{}, []byte("{}"))
		return err
	}
	var e *manifest.Error
	// Root can reach a real systemd without a bus.
	if err := call(time.Minute); os.Geteuid() != 0 || !HasServices() {
		if !errors.As(err, &e) || e.Code != manifest.Internal {
			t.Errorf("no bus: %v", err)
		}
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if err := call(pageReserve + 100*time.Millisecond); !errors.As(err, &e) || e.Code != manifest.DeadlineExceeded {
		t.Errorf("a silent bus: %v", err)
	}
}
