package handlers

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/go-systemd/v22/dbus"

	"agentctl/manifest"
	"agentctl/prober/inspect"
)

// Defaults and bounds of system.services.
const (
	defaultServices = 50
	maxServices     = 200
	maxServiceName  = 256 // characters
	maxServiceText  = 128 // of a description
	maxServiceWord  = 32  // of a state or a result
)

// systemd is what Services uses of a connection to systemd, a *dbus.Conn.
type systemd interface {
	ListUnitsByPatternsContext(ctx context.Context, states, patterns []string) ([]dbus.UnitStatus, error)
	GetUnitPropertyContext(ctx context.Context, unit, property string) (*dbus.Property, error)
	GetServicePropertyContext(ctx context.Context, service, property string) (*dbus.Property, error)
	Close()
}

// Services answers system.services: list from systemd, over D-Bus. Each call makes a connection and
// closes it, so that a board that nobody asks holds none open. Use NewServices.
type Services struct {
	connect func(ctx context.Context) (systemd, error)
}

var _ Handler = (*Services)(nil)

// NewServices returns the handler of system.services.
func NewServices() *Services {
	return &Services{func(ctx context.Context) (systemd, error) { return dbus.NewWithContext(ctx) }}
}

// HasServices reports whether systemd runs this machine (sd_booted(3)).
func HasServices() bool {
	st, err := os.Lstat("/run/systemd/system")
	return err == nil && st.IsDir()
}

// Capability is list.
func (s *Services) Capability() manifest.Capability {
	return manifest.Inspection(manifest.KindServices)
}

// servicesInput is the input of list. The cursor is the number of services on the pages before.
type servicesInput struct {
	State  string `json:"state"`
	Name   string `json:"name"`
	Limit  int    `json:"limit"`
	Cursor string `json:"cursor"`
}

// servicesPage is the output of list.
type servicesPage struct {
	Total      int       `json:"total"`
	Services   []service `json:"services"`
	NextCursor string    `json:"next_cursor,omitempty"`
	Unfinished []string  `json:"unfinished,omitempty"`
}

// service is one unit of the type service.
type service struct {
	Name        string    `json:"name"` // without .service
	Description string    `json:"description,omitempty"`
	State       string    `json:"state"`
	SubState    string    `json:"sub_state,omitempty"`
	SinceMS     int64     `json:"since_ms,omitempty"`
	PID         int64     `json:"pid,omitempty"`
	Restarts    int64     `json:"restarts"`
	Enabled     string    `json:"enabled,omitempty"`
	LastExit    *lastExit `json:"last_exit,omitempty"`
}

// lastExit is how a service ended last: with a code or by a signal.
type lastExit struct {
	Result string `json:"result"` // systemd's word: success, exit-code, signal, timeout and others
	Code   *int64 `json:"code,omitempty"`
	Signal int64  `json:"signal,omitempty"`
	AtMS   int64  `json:"at_ms,omitempty"`
}

// Call answers one page, in the order of names. One request to systemd gets the states of all
// services. Details take several requests for each service and are left out when the time is up.
func (s *Services) Call(ctx context.Context, _ manifest.ToolName, args []byte) ([]byte, Stream, error) {
	in := servicesInput{State: "all", Limit: defaultServices}
	if err := json.Unmarshal(args, &in); err != nil {
		return nil, nil, err
	}
	timed, cancel := pageContext(ctx)
	defer cancel()
	conn, err := s.connect(timed)
	if err != nil {
		return nil, nil, busError(timed, "systemd cannot be reached over D-Bus; on the board try: busctl status")
	}
	defer conn.Close()
	list, err := conn.ListUnitsByPatternsContext(timed, nil, []string{"*.service"})
	if err != nil {
		return nil, nil, busError(timed, "systemd does not list its units; on the board try: systemctl list-units")
	}
	list = selectUnits(list, &in)
	begin, _ := strconv.Atoi(cmp.Or(in.Cursor, "0"))
	if begin > len(list) {
		return nil, nil, manifest.E(manifest.ManifestInvalid, "argument cursor: not of a page with these arguments")
	}
	page := &servicesPage{Total: len(list), Services: []service{}}
	size := 0
	for i, u := range list[begin:] {
		svc := newService(u)
		// After one failure the others are listed without details: the time is up, or each would fail.
		if page.Unfinished == nil && svc.readDetails(timed, conn, u.Name) != nil {
			page.Unfinished = []string{"details"}
		}
		raw, err := json.Marshal(&svc)
		if err != nil {
			return nil, nil, err
		}
		if size += len(raw) + 1; size > maxPageSize-pageOverheadOfServices || i == in.Limit {
			page.NextCursor = strconv.Itoa(begin + i)
			break
		}
		page.Services = append(page.Services, svc)
	}
	raw, err := json.Marshal(page)
	return raw, nil, err
}

// pageOverheadOfServices is more than the size of a page without services, in bytes.
const pageOverheadOfServices = 128

// busError returns the error of a call that got nothing from systemd.
func busError(ctx context.Context, message string) error {
	if ctx.Err() != nil {
		return manifest.E(manifest.DeadlineExceeded, "systemd does not answer in time")
	}
	return manifest.E(manifest.Internal, message)
}

// serviceStates are the states of the schema. Later versions of systemd may have more: "other".
var serviceStates = []string{"active", "reloading", "inactive", "failed", "activating", "deactivating", "maintenance", "refreshing"}

// selectUnits returns the units that the arguments select, in the order of their names. It leaves out
// units that only other units name, and that are not installed.
func selectUnits(list []dbus.UnitStatus, in *servicesInput) []dbus.UnitStatus {
	part := strings.ToLower(in.Name)
	list = slices.DeleteFunc(list, func(u dbus.UnitStatus) bool {
		state := u.ActiveState
		if state != "failed" && state != "inactive" {
			state = "active" // also activating, deactivating and others between
		}
		return (in.State != "all" && state != in.State) ||
			(u.LoadState == "not-found" && state == "inactive") ||
			!strings.Contains(strings.ToLower(strings.TrimSuffix(u.Name, ".service")), part)
	})
	slices.SortFunc(list, func(a, b dbus.UnitStatus) int { return cmp.Compare(a.Name, b.Name) })
	return list
}

// newService returns what the list of units has of a service.
func newService(u dbus.UnitStatus) service {
	s := service{Name: inspect.Text(strings.TrimSuffix(u.Name, ".service"), maxServiceName), State: u.ActiveState, SubState: inspect.Text(u.SubState, maxServiceWord)}
	if u.Description != u.Name { // systemd's default
		s.Description = inspect.Text(u.Description, maxServiceText)
	}
	if !slices.Contains(serviceStates, s.State) {
		s.State = "other"
	}
	return s
}

// readDetails reads the properties of a service one by one: reading all would transfer hundreds. A
// property stays empty if the service is gone, or systemd is too old to have it. The error is that
// the time is up, or the connection broken.
func (s *service) readDetails(ctx context.Context, conn systemd, unit string) error {
	s.SinceMS = serviceTime(number(conn.GetUnitPropertyContext(ctx, unit, "StateChangeTimestamp")))
	s.PID = number(conn.GetServicePropertyContext(ctx, unit, "MainPID"))
	s.Restarts = number(conn.GetServicePropertyContext(ctx, unit, "NRestarts"))
	s.Enabled = word(conn.GetUnitPropertyContext(ctx, unit, "UnitFileState"))
	exit := lastExit{Result: word(conn.GetServicePropertyContext(ctx, unit, "Result"))}
	code := number(conn.GetServicePropertyContext(ctx, unit, "ExecMainCode"))
	status := number(conn.GetServicePropertyContext(ctx, unit, "ExecMainStatus"))
	switch code {
	case exited:
		exit.Code = &status
	case killed, dumped:
		exit.Signal = status
	}
	if code != 0 {
		exit.AtMS = serviceTime(number(conn.GetServicePropertyContext(ctx, unit, "ExecMainExitTimestamp")))
	}
	if exit.Result != "" && (code != 0 || exit.Result != "success") { // it has ended at least once
		s.LastExit = &exit
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if exit.Result == "" && s.SinceMS == 0 && s.Enabled == "" { // no property could be read
		return errors.New("handlers: systemd does not answer for " + unit)
	}
	return nil
}

// number returns the value of a property; 0 if it could not be read. The numbers of systemd have the
// D-Bus types t, u and i.
func number(p *dbus.Property, err error) int64 {
	if err != nil {
		return 0
	}
	switch v := p.Value.Value().(type) {
	case uint64:
		return int64(min(v, 1<<62))
	case uint32:
		return int64(v)
	case int32:
		return int64(v)
	}
	return 0
}

// word returns the text of a property; "" if it could not be read.
func word(p *dbus.Property, err error) string {
	if err != nil {
		return ""
	}
	v, _ := p.Value.Value().(string)
	return inspect.Text(v, maxServiceWord)
}

// Values of ExecMainCode: those of si_code for SIGCHLD (sigaction(2)), CLD_EXITED, CLD_KILLED and
// CLD_DUMPED. 0: the main process has not ended yet.
const (
	exited = 1
	killed = 2
	dumped = 3
)

// serviceTime converts a time of systemd from microseconds to milliseconds since 1970; 0 if the
// schema does not admit it.
func serviceTime(us int64) int64 {
	if ms := us / 1000; ms > 0 && ms <= 253402300799999 {
		return ms
	}
	return 0
}
