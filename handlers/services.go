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
)

// Defaults and bounds of system.services.
const (
	defaultServices = 50
	maxServices     = 200
	maxServiceText  = 128 // characters of a description
)

// units is what Services uses of a connection to systemd.
type units interface {
	ListUnitsByPatternsContext(ctx context.Context, states, patterns []string) ([]dbus.UnitStatus, error)
	GetUnitPropertyContext(ctx context.Context, unit, property string) (*dbus.Property, error)
	GetServicePropertyContext(ctx context.Context, service, property string) (*dbus.Property, error)
	Close()
}

// Services answers system.services: list from systemd, over D-Bus. A call opens a connection and
// closes it, so that a board that nobody asks has none.
type Services struct {
	connect func(ctx context.Context) (units, error)
}

var _ Handler = (*Services)(nil)

// NewServices returns the handler of system.services.
func NewServices() *Services {
	return &Services{func(ctx context.Context) (units, error) { return dbus.NewWithContext(ctx) }}
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

// servicesInput is the input of list.
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

type service struct {
	Name        string    `json:"name"`
	Description string    `json:"description,omitempty"`
	State       string    `json:"state"`
	SubState    string    `json:"sub_state,omitempty"`
	SinceMS     int64     `json:"since_ms,omitempty"`
	PID         int64     `json:"pid,omitempty"`
	Restarts    int64     `json:"restarts"`
	Enabled     string    `json:"enabled,omitempty"`
	LastExit    *lastExit `json:"last_exit,omitempty"`
}

type lastExit struct {
	Result string `json:"result"`
	Code   *int64 `json:"code,omitempty"`
	Signal int64  `json:"signal,omitempty"`
	AtMS   int64  `json:"at_ms,omitempty"`
}

// Call answers one page, in the order of the names. The states come from one request to systemd; what
// takes requests for each service is left out when the time is up.
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

// pageOverheadOfServices is more than a page without services takes, bytes.
const pageOverheadOfServices = 128

// busError is the error of a call that failed before it had anything to answer.
func busError(ctx context.Context, message string) error {
	if ctx.Err() != nil {
		return manifest.E(manifest.DeadlineExceeded, "systemd does not answer in time")
	}
	return manifest.E(manifest.Internal, message)
}

// serviceStates are the states that the schema has. systemd may have more in later versions.
var serviceStates = []string{"active", "reloading", "inactive", "failed", "activating", "deactivating", "maintenance", "refreshing"}

// selectUnits returns the units that the arguments select, in the order of their names. Units that
// are named by others, but not installed, are not services of the machine.
func selectUnits(list []dbus.UnitStatus, in *servicesInput) []dbus.UnitStatus {
	part := strings.ToLower(in.Name)
	list = slices.DeleteFunc(list, func(u dbus.UnitStatus) bool {
		state := u.ActiveState
		if state != "failed" && state != "inactive" {
			state = "active" // or on its way there or back
		}
		return (in.State != "all" && state != in.State) ||
			(u.LoadState == "not-found" && state == "inactive") ||
			!strings.Contains(strings.ToLower(strings.TrimSuffix(u.Name, ".service")), part)
	})
	slices.SortFunc(list, func(a, b dbus.UnitStatus) int { return cmp.Compare(a.Name, b.Name) })
	return list
}

// newService returns what the list of units says.
func newService(u dbus.UnitStatus) service {
	s := service{Name: cutChars(strings.TrimSuffix(u.Name, ".service"), 256), State: u.ActiveState, SubState: cutChars(u.SubState, 32)}
	if u.Description != u.Name { // which it is without one
		s.Description = cutChars(u.Description, maxServiceText)
	}
	if !slices.Contains(serviceStates, s.State) {
		s.State = "other"
	}
	return s
}

// readDetails reads the properties of a service one by one: all at once would be hundreds. A service
// that is gone, or of an older systemd that lacks one, has less of them; the error is that the time is
// up, or the connection broken.
func (s *service) readDetails(ctx context.Context, conn units, unit string) error {
	number := func(get func(context.Context, string, string) (*dbus.Property, error), property string) int64 {
		p, err := get(ctx, unit, property)
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
	text := func(get func(context.Context, string, string) (*dbus.Property, error), property string) string {
		p, err := get(ctx, unit, property)
		if err != nil {
			return ""
		}
		v, _ := p.Value.Value().(string)
		return cutChars(v, 32)
	}
	s.SinceMS = serviceTime(number(conn.GetUnitPropertyContext, "StateChangeTimestamp"))
	s.PID = number(conn.GetServicePropertyContext, "MainPID")
	s.Restarts = number(conn.GetServicePropertyContext, "NRestarts")
	s.Enabled = text(conn.GetUnitPropertyContext, "UnitFileState")
	exit := lastExit{Result: text(conn.GetServicePropertyContext, "Result")}
	code, status := number(conn.GetServicePropertyContext, "ExecMainCode"), number(conn.GetServicePropertyContext, "ExecMainStatus")
	switch code {
	case exited:
		exit.Code = &status
	case killed, dumped:
		exit.Signal = status
	}
	if code != 0 {
		exit.AtMS = serviceTime(number(conn.GetServicePropertyContext, "ExecMainExitTimestamp"))
	}
	if exit.Result != "" && (code != 0 || exit.Result != "success") { // it has ended once
		s.LastExit = &exit
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if exit.Result == "" && s.SinceMS == 0 && s.Enabled == "" { // not one answer
		return errors.New("handlers: systemd does not answer for " + unit)
	}
	return nil
}

// Values of ExecMainCode, those of si_code for SIGCHLD (sigaction(2)).
const (
	exited = 1
	killed = 2
	dumped = 3
)

// serviceTime is a time of systemd, in microseconds, in milliseconds; 0 if it is not one.
func serviceTime(us int64) int64 {
	if ms := us / 1000; ms > 0 && ms <= 253402300799999 {
		return ms
	}
	return 0
}

// cutChars returns at most n characters of s, as valid UTF-8.
func cutChars(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	for i := range s {
		if n--; n < 0 {
			return s[:i]
		}
	}
	return s
}
