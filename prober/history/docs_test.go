package history

import (
	"database/sql/driver"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"agentctl/prober"
)

// TestDocs: the queries of docs/history.md answer what they say, and it names every
// column and every reading.
func TestDocs(t *testing.T) {
	b, err := os.ReadFile("../../docs/history.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(b)
	s, c := open(t, Options{})
	c.set(time.Now().UnixMilli() - 7000)
	yes, used := true, 1.5
	var modules moduleRecorder
	for i := range 7 {
		c.step(time.Second)
		x := c.sample(100 * i)
		x.Mono *= 10 // for each sample to be one that modules are kept with
		x.Modules = &prober.ModuleReadings{
			Network:     &prober.Network{WindowMS: 1000, ErrorsIn: 1},
			Temperature: &prober.Temperature{HottestC: 40 + float64(i)},
			Power:       &prober.Power{UnderVoltage: &yes, FreqCapped: &yes, Throttled: &yes, SoftTempLimit: &yes},
			Wear:        &prober.Wear{UsedPct: &used, PreEOL: prober.EOLNormal},
		}
		s.Add(x, modules.record(x)...)
	}
	flush(t, s)

	var queries [][2]string // with what a row of its answer ends in
	for i, m := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(page, -1) {
		queries = append(queries, [2]string{m[1], []string{"|6\n", "|45.23\n", "|46\n"}[min(i, 2)]})
	}
	shell := regexp.MustCompile(`sqlite3 -readonly .*history.db '(.*)'`).FindStringSubmatch(page)
	if shell == nil || len(queries) != 3 {
		t.Fatalf("the page has %d queries of 3 and this one for the shell: %q", len(queries), shell)
	}
	queries = append(queries, [2]string{shell[1], "|6|8192|1024\n"})
	for _, q := range queries {
		if got := ask(t, s, q[0]); !strings.Contains(got, q[1]) {
			t.Errorf("%s\ngives %q, want %q in it", q[0], got, q[1])
		}
	}

	names := ask(t, s, "SELECT name FROM pragma_table_info('samples') UNION SELECT name FROM pragma_table_info('metrics') UNION SELECT key FROM keys")
	if n := strings.Count(names, "\n"); n != 20 {
		t.Errorf("%d names of columns and readings, want 20", n)
	}
	for name := range strings.Lines(names) {
		if name = strings.TrimSpace(name); !strings.Contains(page, "`"+name+"`") {
			t.Errorf("docs/history.md does not say what %s is", name)
		}
	}
}

// ask is the answer to a query, as SQLite's shell prints it.
func ask(t *testing.T, s *Store, sql string) string {
	t.Helper()
	var out strings.Builder
	err := s.withDB(func(d *db) error {
		return d.each(sql, func(row []driver.Value) bool {
			for i, v := range row {
				fmt.Fprint(&out, "|"[:min(i, 1)], v)
			}
			out.WriteByte('\n')
			return true
		})
	})
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return out.String()
}
