package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

func (a *app) renderHosts(h hostsOut) {
	if len(h.Hosts) == 0 {
		fmt.Fprintln(a.stdout, "no hosts")
		return
	}
	rows := [][]string{{"HOST", "STATE", "ZONE", "TIERS", "MEMORY", "AWAKE", "SESSIONS", "UNSAVED", "LEASE", "NOTE"}}
	for _, o := range h.Hosts {
		rows = append(rows, []string{o.Host, o.State, or(plain(o.Zone), "-"), or(strings.Join(tierWords(o), ","), "-"),
			bytesWord(o.Used.MemoryBytes) + " of " + bytesWord(o.Capacity.MemoryBytes), strconv.Itoa(int(o.Active)), strconv.Itoa(int(o.Sessions)),
			strconv.Itoa(int(o.Unsaved)), leaseWord(o), plain(noteOf(o))})
	}
	table(a.stdout, rows)
	a.renderTiers(h.Hosts, true)
}

func leaseWord(o hostOut) string {
	if o.LeaseLeftMS <= 0 {
		return "-"
	}
	return strconv.FormatFloat(o.LeaseLeftMS/1000, 'f', 1, 64) + " s"
}

// noteOf says why a host is in its state, or until when.
func noteOf(o hostOut) string {
	var notes []string
	if o.Unhealthy != "" {
		notes = append(notes, o.Unhealthy)
	}
	if o.State == "draining" && o.DrainDeadline != nil {
		notes = append(notes, "sessions that are still busy at "+when(*o.DrainDeadline)+" are put to sleep")
	}
	switch {
	case o.State == "lost" && !o.Lost:
		notes = append(notes, "not heard of; its sessions are not handed over yet")
	case o.State == "lost" && o.Unsaved > 0:
		notes = append(notes, "unsaved files are on it alone")
	}
	return strings.Join(notes, "; ")
}

func (a *app) renderHost(o hostOut) {
	var labels []string
	for _, k := range slices.Sorted(maps.Keys(o.Labels)) {
		labels = append(labels, k+"="+o.Labels[k])
	}
	unsaved := ""
	if o.Unsaved > 0 {
		unsaved = fmt.Sprintf("%s %s files on this host that are nowhere else", count(int(o.Unsaved), "session", "sessions"), verb(int(o.Unsaved), "has", "have"))
	}
	a.fields("host", o.Host, "state", o.State, "note", noteOf(o), "zone", o.Zone, "labels", strings.Join(labels, ", "),
		"tiers", strings.Join(tierWords(o), ", "), "lease left", leaseWord(o),
		"sessions", fmt.Sprintf("%d, of which %d awake", o.Sessions, o.Active), "unsaved", unsaved,
		"memory", bytesWord(o.Used.MemoryBytes)+" of "+bytesWord(o.Capacity.MemoryBytes),
		"cpu", fmt.Sprintf("%.4g of %.4g", float64(o.Used.CPUMillis)/1000, float64(o.Capacity.CPUMillis)/1000),
		"processes", fmt.Sprintf("%d of %d", o.Used.PIDs, o.Capacity.PIDs),
		"disk", bytesWord(o.Used.DiskBytes)+" of "+bytesWord(o.Capacity.DiskBytes), "boot", o.Boot)
	a.renderTiers([]hostOut{o}, false)
}

func (a *app) renderRemoved(o removedOut) {
	fmt.Fprintf(a.stdout, "host %s is removed for good\n", o.Host)
	for _, s := range o.Rewound {
		fmt.Fprintf(a.stdout, "session %s goes back to its last snapshot\n", s)
	}
	for _, s := range o.Lost {
		fmt.Fprintf(a.stdout, "session %s failed: it was never saved\n", s)
	}
}
