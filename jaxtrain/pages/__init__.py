"""One page, one chart and one table for every report: HTML and SVG that load nothing."""

from jaxtrain.pages.axes import Axis as Axis
from jaxtrain.pages.axes import between as between
from jaxtrain.pages.axes import linear as linear
from jaxtrain.pages.axes import logarithmic as logarithmic
from jaxtrain.pages.axes import whole as whole
from jaxtrain.pages.chart import Cell as Cell
from jaxtrain.pages.chart import Chart as Chart
from jaxtrain.pages.chart import Panel as Panel
from jaxtrain.pages.chart import Region as Region
from jaxtrain.pages.chart import Stop as Stop
from jaxtrain.pages.chart import Strip as Strip
from jaxtrain.pages.chart import band as band
from jaxtrain.pages.chart import bars as bars
from jaxtrain.pages.chart import curve as curve
from jaxtrain.pages.chart import svg as svg
from jaxtrain.pages.page import READOUT as READOUT
from jaxtrain.pages.page import render_page as render_page
from jaxtrain.pages.table import Table as Table
